//! The same graph with room for values above 65504: f32 in place of f16.

use super::dtype::DType;
use super::graph::{Graph, Node, PathId, ValueId};
use super::op::{Op, ValueType};

/// `graph` with f32 for every f16 value between its inputs, weights and constants, and its outputs, whose types stay.
pub fn widened(graph: &Graph) -> Graph {
    let mut wide = Graph {
        symbols: graph.symbols.clone(),
        inputs: graph.inputs.clone(),
        parameters: graph.parameters.clone(),
        constants: graph.constants.clone(),
        paths: graph.paths.clone(),
        nodes: Vec::with_capacity(graph.nodes.len()),
        outputs: Vec::new(),
    };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.nodes.len());
    for node in &graph.nodes {
        let inputs = node.inputs.iter().map(|i| map[i.index()]).collect();
        let is_given = matches!(node.op, Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. });
        let mut ty = node.ty.clone();
        if ty.dtype == DType::F16 && !is_given {
            ty.dtype = DType::F32;
        }
        let mut value = wide.push(Node { op: node.op.clone(), inputs, ty, path: node.path });
        if is_given {
            value = converted(&mut wide, value, DType::F16, DType::F32, node.path);
        }
        map.push(value);
    }
    for &output in &graph.outputs {
        let (value, path) = (map[output.index()], graph.node(output).path);
        let value = match graph.ty(output).dtype {
            DType::F16 => converted(&mut wide, value, DType::F32, DType::F16, path),
            _ => value,
        };
        wide.outputs.push(value);
    }
    wide
}

/// `value` as `to` if it is `from`.
fn converted(graph: &mut Graph, value: ValueId, from: DType, to: DType, path: PathId) -> ValueId {
    let ty = graph.ty(value).clone();
    match ty.dtype == from {
        true => graph.push(Node { op: Op::Convert, inputs: vec![value], ty: ValueType::new(to, ty.shape), path }),
        false => value,
    }
}
