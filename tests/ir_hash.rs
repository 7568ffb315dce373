//! What the hash of a graph depends on, and what it does not.

use oxidiff::ir::{Graph, parse_graph};

const GRAPH: &str = r#"symbol s0 "batch" = [1, 2]
input 0 "x": f32[s0,4]
parameter 0 "w": f32[8,4]
constant 0: f32[1] = 0x0000803f
%0: f32[s0,4] = input() {index=0}
%1: f32[8,4] = parameter() {index=0}
%2: f32[s0,8] = linear(%0, %1)  // proj
%3: f32[1] = constant() {index=0}
%4: f32[s0,8] = add(%2, %3)
%5: f32[s0,8] = pad(%4) {before=[0, 0], value=0.5}
return %5
"#;

fn hash(text: &str) -> String {
    parse_graph(text).unwrap_or_else(|e| panic!("{text}{e}")).hash()
}

#[test]
fn is_stable() {
    assert_eq!(hash(GRAPH), hash(GRAPH));
    assert_eq!(hash(GRAPH).len(), 64);
    assert_ne!(hash(GRAPH), Graph::new().hash());
}

#[test]
fn ignores_names_of_symbols_samples_and_paths() {
    for (from, to) in [("\"batch\"", "\"b\""), ("[1, 2]", "[1, 2, 3]"), ("  // proj", ""), ("// proj", "// other")] {
        let changed = GRAPH.replace(from, to);
        assert_ne!(changed, GRAPH);
        assert_eq!(hash(&changed), hash(GRAPH), "{from} -> {to}");
    }
}

#[test]
fn depends_on_everything_else() {
    for (from, to) in [
        ("\"x\"", "\"y\""),
        ("\"w\"", "\"v\""),
        ("0x0000803f", "0x0000003f"),
        ("add(%2, %3)", "sub(%2, %3)"),
        ("add(%2, %3)", "add(%3, %2)"),
        ("value=0.5", "value=-0.5"),
        ("before=[0, 0]", "before=[0, s0]"),
        ("return %5", "return %4"),
        ("return %5", "return %5, %5"),
        ("f32[s0,8]", "f32[8,s0]"),
        ("f32", "bf16"),
    ] {
        // bf16 constants need half the data.
        let changed = GRAPH.replace(from, to).replace("bf16[1] = 0x0000803f", "bf16[1] = 0x803f");
        assert_ne!(changed, GRAPH);
        assert_ne!(hash(&changed), hash(GRAPH), "{from} -> {to}");
    }
}
