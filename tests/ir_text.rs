//! The text form reads back as the same graph, and nonsense is refused with its line.

use oxidiff::Error;
use oxidiff::ir::{BinaryOp, DType, Dim, Graph, Node, Op, ValueType, parse_graph, print_graph};

const EXAMPLE: &str = r#"symbol s0 "batch" = [1, 2, 3]
symbol s1 "a \"name\"\u{a}" = [4, -6, 8]
input 0 "sample": f16[s0,4,s1,floor(1+s1,2)]
parameter 0 "proj.weight": f16[8,4]
constant 0: f32[2] = 0x0000803f00000040
constant 1: i64[0] = 0x
%0: f16[s0,4,s1,floor(1+s1,2)] = input() {index=0}
%1: f16[s0,s1,floor(1+s1,2),4] = permute(%0) {dims=[0, 2, 3, 1]}  // down.0
%2: f16[8,4] = parameter() {index=0}
%3: f16[s0,s1,floor(1+s1,2),8] = linear(%1, %2)  // down.0.proj
%4: f32[] = full() {value=1e-5}
%5: f64[1] = full() {value=-inf}  // down.0
%6: f64[] = full() {value=-0.0}  // " spaced"
%7: f16[s0,8,2*s1,s1] = upsample_nearest(%3) {first_dim=2, scales=[2.0, 2.0], exact=false}
%8: i64[s1] = arange() {start=-s0/2, step=3}
return %7, %3, %3
"#;

#[test]
fn example_round_trips() {
    let graph = parse_graph(EXAMPLE).unwrap();
    assert_eq!(graph.paths, ["", "down.0", "down.0.proj", " spaced"]);
    assert_eq!(graph.symbols[1].name, "a \"name\"\n");
    assert_eq!(print_graph(&graph), EXAMPLE);
    assert_eq!(parse_graph(&print_graph(&graph)).unwrap(), graph);
}

#[test]
fn table_of_paths_survives_unused_entries() {
    let mut graph = Graph::new();
    let path = (graph.intern_path("unused"), graph.intern_path("used")).1;
    let op = Op::Full { value: f64::MIN_POSITIVE };
    let x = graph.push(Node { op, inputs: vec![], ty: ValueType::new(DType::F64, vec![]), path });
    let ty = ValueType::new(DType::Bool, vec![Dim::constant(1)]);
    graph.push(Node { op: Op::Binary(BinaryOp::Lt), inputs: vec![x, x], ty, path });
    let text = print_graph(&graph);
    assert!(text.ends_with("return\n"), "{text}");
    assert_eq!(parse_graph(&text).unwrap(), graph);
}

#[test]
fn malformed_lines_are_refused_with_their_number() {
    let x = "%0: f32[2] = full() {value=1}";
    for (line, text) in [
        (0, ""),
        (1, x),
        (2, &format!("{x}\nreturn %1")),
        (2, &format!("{x}\nreturn 0")),
        (3, &format!("{x}\nreturn %0\n{x}")),
        (2, &format!("{x}\ninput 0 \"late\": f32[]\nreturn %0")),
        (1, "symbol s1 \"x\" = [1]\nreturn"),
        (1, "symbol s0 \"x = [1]\nreturn"),
        (1, "symbol s0 \"x\\q\" = [1]\nreturn"),
        (1, "symbol s0 \"x\" = [1.5]\nreturn"),
        (1, "input 1 \"x\": f32[]\nreturn"),
        (1, "input 0 \"x\": f31[]\nreturn"),
        (1, "input 0 \"x\": f32[2\nreturn"),
        (1, "input 0 \"x\": f32[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]\nreturn"),
        (1, "constant 0: f32[2] = 0x00\nreturn"),
        (1, "constant 0: f32[0] = 0x0\nreturn"),
        (1, "constant 0: f32[s0] = 0x\nreturn"),
        (1, "constant 0: u8[9223372036854775807,2] = 0x\nreturn"),
        (1, "%1: f32[2] = full() {value=1}\nreturn"),
        (1, "%0: f32[2] = nothing()\nreturn"),
        (1, "%0: f32[2] = full()\nreturn"),
        (1, "%0: f32[2] = full() {value=1, value=1}\nreturn"),
        (1, "%0: f32[2] = full() {value=[1]}\nreturn"),
        (1, "%0: f32[2] = full() {value=1\nreturn"),
        (1, "%0: f32[2] = full() {value=one}\nreturn"),
        (1, "%0: f32[2] = full() {value=1} tail\nreturn"),
        (1, "%0: f32[2] = neg(%0)\nreturn"),
        (1, "%0: f32[(] = full() {value=1}\nreturn"),
        (1, "%0: f32[)] = full() {value=1}\nreturn"),
        (1, "%4294967296: f32[] = full() {value=1}\nreturn"),
        (1, "éé\nreturn"),
    ] {
        match parse_graph(text) {
            Err(Error::Parse { line: at, .. }) => assert_eq!(at, line, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

/// Cutting or overwriting the text anywhere gives a graph or an error, never a panic.
#[test]
fn damaged_text_does_not_panic() {
    let bytes = EXAMPLE.as_bytes();
    for at in 0..bytes.len() {
        let _ = parse_graph(&String::from_utf8_lossy(&bytes[..at]));
        for with in *b"()[]{},%\"\\/9 -" {
            let mut damaged = bytes.to_vec();
            damaged[at] = with;
            let _ = parse_graph(&String::from_utf8_lossy(&damaged));
        }
    }
}
