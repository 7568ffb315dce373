//! `Tree`: what a module computes, read off its tree of submodules in one go.
//!
//! Two modules with the same fingerprint compute the same function of their tensors and arguments. It is a digest of values
//! where values say it all, so that it is the same for another module of the same class and configuration, and of
//! addresses elsewhere (classes, functions, objects with a state that Python does not show); what has an address in it is
//! kept alive. LoRA layers do not show in it. It is read by a [`Scan`].
//!
//! Floats are kept apart, in the order in which they were met: which of them are inputs of a program, and so no part of what
//! it is, is for the caller to say ([`Tree::fingerprint`]).
//!
//! Everything that was read can be watched ([`super::watch`]).

use pyo3::exceptions::{PyIndexError, PyNotImplementedError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple, PyType};

use super::addresses::ByAddress;
use super::attributes::{Classes, SKIPPED};
use super::errors::shielded;
use super::layout::{TensorLayout, prefetch};
use super::lists::Lists;
use super::scan::{Float, MODULES_AT, Node, Questions, Scan};
use super::tensor::Exchange;
use super::tokens::{ABSENT, SEEN, TEXT, Tokens, VALUE, type_of};
use super::versions::Dicts;

/// How many modules ahead of the one that is read memory is asked for.
const AHEAD: usize = 16;

/// See the stub file.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Tree {
    nodes: Vec<Node>,
    pub(super) dicts: Dicts,
    /// Its own, each once, then those of its adapters.
    pub(super) tensors: Vec<Py<PyAny>>,
    own: usize,
    types: Vec<u8>,
    /// The fingerprint without floats.
    form: [u8; 32],
    floats: Vec<Float>,
    pub(super) lists: Lists,
    kept: Py<PyList>,
    has_other_adapters: bool,
    obstacle: Option<(String, String)>,
}

impl Tree {
    /// Whether a module is of another class now.
    pub(super) fn has_other_classes(&self, _py: Python<'_>) -> bool {
        self.nodes.iter().enumerate().any(|(i, node)| {
            if let Some(ahead) = self.nodes.get(i + AHEAD) {
                prefetch(ahead.module.as_ptr().addr());
            }
            // SAFETY: the module is kept alive by `self`; `_py` proves that the GIL is held.
            unsafe { ffi::Py_TYPE(node.module.as_ptr()) }.addr() != node.class
        })
    }
}

#[pymethods]
impl Tree {
    #[new]
    fn new<'py>(
        module: Bound<'py, PyAny>,
        base_of: Bound<'py, PyAny>,
        obstacle: Bound<'py, PyAny>,
        around: Bound<'py, PyAny>,
        is_plain: Bound<'py, PyAny>,
        slots: Bound<'py, PyAny>,
        adapter: Option<Bound<'py, PyType>>,
    ) -> PyResult<Self> {
        shielded("reading a module", || {
            let py = module.py();
            let ordered = py.import("collections")?.getattr("OrderedDict")?;
            let mut scan = Scan::new(py, Questions { base_of, obstacle, around, is_plain, slots, ordered, adapter })?;
            scan.read(module)?;
            let (own, types) = (scan.tensors.len(), std::mem::take(&mut scan.types.0));
            let form = *blake3::hash(&scan.tokens.0).as_bytes();
            let layers: Vec<_> = scan.nodes.iter().filter_map(|n| n.layer.as_ref().map(|l| l.clone_ref(py))).collect();
            for layer in layers {
                scan.adapters(layer.bind(py))?;
            }
            for (_, class) in scan.kinds.values() {
                scan.kept.append(class)?;
            }
            scan.dicts.close();
            Ok(Self {
                nodes: scan.nodes,
                dicts: scan.dicts,
                tensors: scan.tensors,
                own,
                types,
                form,
                floats: scan.floats,
                lists: scan.lists,
                kept: scan.kept.unbind(),
                has_other_adapters: scan.has_other_adapters,
                obstacle: scan.obstacle,
            })
        })
    }

    #[classattr]
    const SKIPPED: &'static [&'static str] = SKIPPED;

    #[getter]
    fn form<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.form)
    }

    #[getter]
    fn floats(&self) -> Vec<f64> {
        self.floats.iter().map(|float| float.value).collect()
    }

    /// The fingerprint, without the values of some floats.
    fn fingerprint<'py>(&self, py: Python<'py>, inputs: Vec<usize>) -> Bound<'py, PyBytes> {
        let mut digest = blake3::Hasher::new();
        digest.update(&self.form);
        let mut inputs = inputs.into_iter().peekable();
        for (at, float) in self.floats.iter().enumerate() {
            match inputs.next_if_eq(&at) {
                Some(_) => digest.update(&[SEEN]),
                None => digest.update(&[VALUE]).update(&float.value.to_bits().to_le_bytes()),
            };
        }
        PyBytes::new(py, digest.finalize().as_bytes())
    }

    /// The container that holds a float, its key or index there, and its name.
    fn place<'py>(&self, py: Python<'py>, at: usize) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, String)> {
        shielded("finding a number", || {
            let Some(float) = self.floats.get(at) else {
                return Err(PyIndexError::new_err("there are fewer floats"));
            };
            let (holder, key) = (float.place.0.bind(py).clone(), float.place.1.bind(py).clone());
            let path = &self.nodes[float.node].path;
            let dot = if path.is_empty() { "" } else { "." };
            let inside = if float.is_attribute { String::new() } else { format!("[{}]", key.repr()?) };
            Ok((holder, key, format!("{path}{dot}{}{inside}", float.attribute.bind(py))))
        })
    }

    fn is_listed_changed(&self, py: Python<'_>) -> bool {
        self.lists.is_changed(py)
    }

    #[getter]
    fn kept(&self, py: Python<'_>) -> Py<PyList> {
        self.kept.clone_ref(py)
    }

    #[getter]
    fn has_other_adapters(&self) -> bool {
        self.has_other_adapters
    }

    #[getter]
    fn obstacle(&self) -> Option<(String, String)> {
        self.obstacle.clone()
    }

    #[getter]
    fn dicts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.dicts.all().iter().map(|dict| dict.bind(py)))
    }

    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.dicts.copies().iter().map(|dict| dict.bind(py)))
    }

    #[getter]
    fn own_tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.tensors[..self.own].iter().map(|tensor| tensor.bind(py)))
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.tensors.iter().map(|tensor| tensor.bind(py)))
    }

    /// Modules by path; the layer inside for a LoRA layer.
    fn modules<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        self.nodes.iter().try_for_each(|node| found.set_item(&node.path, &node.module))?;
        Ok(found)
    }

    /// LoRA layers by path.
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for node in &self.nodes {
            if let Some(layer) = &node.layer {
                found.set_item(&node.path, layer)?;
            }
        }
        Ok(found)
    }

    /// Paths of the modules whose submodules are in one of these dictionaries.
    fn parents(&self, dicts: Vec<usize>) -> Vec<&str> {
        let of = |dict: &usize| {
            let first = dict.checked_sub(MODULES_AT)?;
            let at = self.nodes.binary_search_by_key(&first, |node| node.first_dict).ok()?;
            Some(self.nodes[at].path.as_str())
        };
        dicts.iter().filter_map(of).collect()
    }

    /// Paths of the modules that one of these dictionaries is of, or in whose attributes it was met first.
    fn owners(&self, dicts: Vec<usize>) -> PyResult<Vec<&str>> {
        shielded("naming modules", || {
            let of = |dict: &usize| {
                let is_inner = self.nodes.first().is_some_and(|node| *dict >= node.first_inner);
                let first = |node: &Node| if is_inner { node.first_inner } else { node.first_dict };
                let at = self.nodes.partition_point(|node| first(node) <= *dict).checked_sub(1)?;
                Some(self.nodes[at].path.as_str())
            };
            Ok(dicts.iter().filter_map(of).collect())
        })
    }

    fn is_reclassed(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("reading classes", || Ok(self.has_other_classes(py)))
    }

    fn is_retyped(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("reading tensors", || {
            let (mut now, exchange) = (Tokens::default(), Exchange::get(py)?);
            self.tensors[..self.own].iter().for_each(|tensor| type_of(&mut now, exchange, tensor.bind(py)));
            Ok(now.0 != self.types)
        })
    }

    /// How its own tensors lie in memory, as far as a trace can see it: orders, classes and what shares a storage.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        shielded("reading tensors", || {
            let (classes, exchange, layout) = (Classes::get(py)?, Exchange::get(py)?, TensorLayout::get(py));
            let (mut tokens, kinds) = (Tokens::default(), PyList::empty(py));
            let mut storages = ByAddress::<u64>::default();
            for (at, tensor) in self.tensors[..self.own].iter().enumerate() {
                let tensor = tensor.bind(py);
                if !classes.is_plain_tensor(tensor) {
                    kinds.append((at, tensor.get_type()))?;
                }
                let view = exchange.view_of_weight(tensor);
                let storage = match layout {
                    // SAFETY: DLPack describes tensors with a storage alone; it is live and the GIL is held.
                    Some(layout) if view.is_some() => unsafe { layout.read(tensor.as_ptr().cast()) }.storage,
                    _ => match tensor.call_method0("untyped_storage") {
                        Ok(storage) => storage.getattr("_cdata")?.extract()?,
                        // Sparse tensors, and those of a library's own layout, have neither a storage nor strides.
                        Err(error) if error.is_instance_of::<PyNotImplementedError>(py) => {
                            tokens.tag(TEXT);
                            continue;
                        }
                        Err(error) => return Err(error),
                    },
                };
                let order = match view {
                    Some(view) if view.is_dense() => None,
                    Some(view) => Some(view.strides.to_vec()),
                    None if tensor.call_method0("is_contiguous")?.is_truthy()? => None,
                    None => Some(tensor.call_method0("stride")?.extract()?),
                };
                let first = *storages.entry(storage).or_insert(at as u64);
                tokens.word(at as u64 - first);
                match order {
                    None => tokens.tag(ABSENT),
                    Some(strides) => strides.into_iter().for_each(|s| tokens.word(s.cast_unsigned())),
                }
            }
            (PyBytes::new(py, blake3::hash(&tokens.0).as_bytes()), kinds.to_tuple()).into_pyobject(py)
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for node in &self.nodes {
            visit.call(&node.module)?;
            visit.call(&node.layer)?;
        }
        self.dicts.traverse(&visit)?;
        self.tensors.iter().try_for_each(|tensor| visit.call(tensor))?;
        for float in &self.floats {
            visit.call(&float.place.0)?;
            visit.call(&float.place.1)?;
        }
        self.lists.traverse(&visit)?;
        visit.call(&self.kept)
    }
}
