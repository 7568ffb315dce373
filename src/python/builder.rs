//! `GraphBuilder`: a captured graph coming in from Python, node by node.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyString};

use super::errors::{guarded, shielded, to_python};
use super::tensor;
use oxidiff::error::{Error, Result};
use oxidiff::ir::{self, Attr, DType, Dim, Graph, Node, Op, PathId, ValueId, ValueType};

/// Names and types.
type Slots = Vec<(String, String)>;

/// A graph under construction.
#[pyclass(module = "oxidiff._native")]
pub struct GraphBuilder {
    graph: Graph,
    path: PathId,
}

impl GraphBuilder {
    /// The graph so far.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    fn value(&self, id: u32) -> Result<ValueId> {
        if (id as usize) < self.graph.nodes.len() {
            return Ok(ValueId(id));
        }
        Err(Error::invalid(format!("value %{id} does not exist: the graph has {} values", self.graph.nodes.len())))
    }
}

fn dtype(name: &str) -> Result<DType> {
    DType::from_name(name).ok_or_else(|| Error::invalid(format!("unknown dtype `{name}`")))
}

fn dim(value: &Bound<'_, PyAny>) -> PyResult<Dim> {
    match value.cast::<PyString>() {
        Ok(text) => text.to_str()?.parse().map_err(|e| to_python(&e)),
        Err(_) => Ok(Dim::constant(value.extract()?)),
    }
}

fn dims(values: &Bound<'_, PyAny>) -> PyResult<Vec<Dim>> {
    values.try_iter()?.map(|v| dim(&v?)).collect()
}

fn attribute(value: &Bound<'_, PyAny>) -> PyResult<Attr> {
    if value.is_instance_of::<PyBool>() {
        return Ok(Attr::Bool(value.extract()?));
    }
    if value.is_instance_of::<PyFloat>() {
        return Ok(Attr::Float(value.extract()?));
    }
    if value.is_instance_of::<PyInt>() || value.is_instance_of::<PyString>() {
        return Ok(Attr::Dim(dim(value)?));
    }
    let items: Vec<Bound<'_, PyAny>> = value.try_iter()?.collect::<PyResult<_>>()?;
    if items.iter().any(|i| i.is_instance_of::<PyFloat>()) {
        return Ok(Attr::Floats(items.iter().map(|i| i.extract()).collect::<PyResult<_>>()?));
    }
    Ok(Attr::Dims(items.iter().map(dim).collect::<PyResult<_>>()?))
}

fn attributes(dict: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, Attr)>> {
    let Some(dict) = dict else { return Ok(Vec::new()) };
    dict.iter().map(|(key, value)| Ok((key.extract()?, attribute(&value)?))).collect()
}

#[pymethods]
impl GraphBuilder {
    #[new]
    fn new() -> Self {
        Self { graph: Graph::new(), path: PathId(0) }
    }

    fn symbol(&mut self, name: &str, samples: Vec<i64>) -> String {
        self.graph.add_symbol(name, samples).to_string()
    }

    #[pyo3(name = "input")]
    fn add_input(&mut self, name: &str, dtype: &str, shape: &Bound<'_, PyAny>) -> PyResult<u32> {
        shielded("adding an input", || {
            let ty = ValueType::new(self::dtype(dtype).map_err(|e| to_python(&e))?, dims(shape)?);
            Ok(self.graph.add_input(name, ty).0)
        })
    }

    #[pyo3(name = "parameter")]
    fn add_parameter(&mut self, name: &str, dtype: &str, shape: Vec<i64>) -> PyResult<u32> {
        Ok(self.graph.add_parameter(name, self::dtype(dtype).map_err(|e| to_python(&e))?, &shape).0)
    }

    #[pyo3(name = "constant")]
    fn add_constant(&mut self, dtype: &str, shape: Vec<i64>, data: &Bound<'_, PyBytes>) -> PyResult<u32> {
        shielded("adding a constant", || {
            let dtype = self::dtype(dtype).map_err(|e| to_python(&e))?;
            Ok(self.graph.add_constant(dtype, &shape, data.as_bytes().to_vec()).0)
        })
    }

    fn path(&mut self, path: &str) {
        self.path = self.graph.intern_path(path);
    }

    #[pyo3(signature = (op, inputs, dtype, shape, attributes=None))]
    fn node(
        &mut self,
        op: &str,
        inputs: Vec<u32>,
        dtype: &str,
        shape: &Bound<'_, PyAny>,
        attributes: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<u32> {
        shielded("adding a node", || {
            let ty = ValueType::new(self::dtype(dtype).map_err(|e| to_python(&e))?, dims(shape)?);
            let op = Op::from_parts(op, self::attributes(attributes)?).map_err(|e| to_python(&e))?;
            let inputs = inputs.into_iter().map(|i| self.value(i)).collect::<Result<_>>().map_err(|e| to_python(&e))?;
            Ok(self.graph.push(Node { op, inputs, ty, path: self.path }).0)
        })
    }

    fn output(&mut self, value: u32) -> PyResult<()> {
        let value = self.value(value).map_err(|e| to_python(&e))?;
        self.graph.outputs.push(value);
        Ok(())
    }

    /// The verified graph of a text that `text` gave; see the stub file.
    #[staticmethod]
    fn from_text(py: Python<'_>, text: &str) -> PyResult<Self> {
        let parse = || {
            let graph = ir::parse_graph(text)?;
            ir::verify_graph(&graph, "parse")?;
            Ok(graph)
        };
        let graph = py.detach(|| guarded("reading a graph", parse))?;
        Ok(Self { graph, path: PathId(0) })
    }

    /// Arguments, weights and symbols; see the stub file.
    fn signature(&self) -> (Slots, Slots, Vec<String>, usize) {
        let graph = &self.graph;
        (
            graph.inputs.iter().map(|i| (i.name.clone(), i.ty.to_string())).collect(),
            graph.parameters.iter().map(|p| (p.name.clone(), p.ty.to_string())).collect(),
            graph.symbols.iter().map(|s| s.name.clone()).collect(),
            graph.outputs.len(),
        )
    }

    fn text(&self) -> PyResult<String> {
        shielded("printing a graph", || Ok(ir::print_graph(&self.graph)))
    }

    fn hash(&self) -> PyResult<String> {
        shielded("hashing a graph", || Ok(self.graph.hash()))
    }

    fn verify(&self) -> PyResult<()> {
        guarded("verifying a graph", || ir::verify_graph(&self.graph, "capture"))
    }

    fn interpret<'py>(
        &self,
        py: Python<'py>,
        sizes: Vec<i64>,
        inputs: Vec<Bound<'py, PyAny>>,
        weights: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let exchange = tensor::Exchange::get(py)?;
        let input_types: Vec<DType> = self.graph.inputs.iter().map(|i| i.ty.dtype).collect();
        let inputs = exchange.copy_to_host(&inputs, &input_types)?;
        let weight_types: Vec<DType> = self.graph.parameters.iter().map(|p| p.ty.dtype).collect();
        let weights = exchange.copy_to_host(&weights, &weight_types)?;
        let results = guarded("interpreting a graph", || ir::interp::run(&self.graph, &sizes, &inputs, &weights))?;
        results.iter().map(|t| exchange.tensor_from(py, t)).collect()
    }
}
