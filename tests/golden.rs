//! Golden tests of passes: `tests/golden/passes/<pass>/<case>.ir`.
//!
//! ```text
//! // RUN: passes=canonicalize,eliminate_dead_code precision=fast device=L4
//! input graph
//! // ----
//! expected graph, or groups if the last pass is `form_groups`
//! ```
//!
//! Comment lines before the input say what the case shows. `OXIDIFF_BLESS=1` writes what came out into the file; review
//! the difference.

use std::fs;
use std::path::{Path, PathBuf};

use oxidiff::ir::{Graph, parse_graph, print_graph, verify_graph};
use oxidiff::kernel_ir;
use oxidiff::passes::{self, PassCtx, Precision};
use oxidiff::target::Profile;

const RULE: &str = "// ----\n";

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/passes");
    let folders = fs::read_dir(root).expect("the golden folder is there");
    let mut cases: Vec<PathBuf> = folders
        .flat_map(|folder| fs::read_dir(folder.expect("readable").path()).expect("a folder per pass"))
        .map(|case| case.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "ir"))
        .collect();
    cases.sort();
    cases
}

/// Settings of the `RUN` line: passes and context.
fn settings(text: &str) -> (Vec<String>, PassCtx, Profile) {
    let line = text.lines().find_map(|l| l.strip_prefix("// RUN: ")).expect("a RUN line");
    let (mut names, mut ctx, mut device) =
        (Vec::new(), PassCtx { rotates_pairs: true, ..PassCtx::default() }, Profile::CPU);
    for word in line.split_whitespace() {
        match word.split_once('=') {
            Some(("passes", list)) => names = list.split(',').map(str::to_owned).collect(),
            Some(("precision", "eager")) => ctx.precision = Precision::Eager,
            Some(("precision", "fast")) => ctx.precision = Precision::Fast,
            Some(("device", name)) => device = *Profile::named(name).expect("a device of the table"),
            _ => panic!("unknown setting `{word}`"),
        }
    }
    (names, ctx, device)
}

fn run(input: &str, path: &Path) -> String {
    let (names, ctx, device) = settings(input);
    let mut graph: Graph = parse_graph(input).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let verify = |graph: &Graph, pass: &str| {
        verify_graph(graph, pass).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    };
    verify(&graph, "parse");
    for name in &names {
        if name == "form_groups" {
            let groups = passes::form_groups_for(&graph, &ctx, &device).expect("groups form");
            kernel_ir::verify(&graph, &groups).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            return kernel_ir::print(&graph, &groups);
        }
        let pass = passes::find(name).unwrap_or_else(|| panic!("{}: no pass `{name}`", path.display()));
        graph = (pass.run)(&graph, &ctx).unwrap_or_else(|e| panic!("{}: {e}", path.display())).0;
        verify(&graph, name);
    }
    print_graph(&graph)
}

#[test]
fn passes_do_what_the_golden_files_say() {
    let bless = std::env::var("OXIDIFF_BLESS").is_ok_and(|v| v == "1");
    let mut failures = Vec::new();
    for path in cases() {
        let text = fs::read_to_string(&path).expect("readable");
        let (input, expected) = text.split_once(RULE).unwrap_or((&text, ""));
        let got = run(input, &path);
        if got == expected {
            continue;
        }
        if bless {
            fs::write(&path, format!("{}{RULE}{got}", input)).expect("writable");
        } else {
            failures.push(format!("{}\n-- expected\n{expected}-- got\n{got}", path.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
