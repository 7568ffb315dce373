//! Golden tests of plans and arenas: `tests/golden/plan/<case>.ir` holds a graph, `// ----`, the plan of its optimized form,
//! and the arena at every sample. `OXIDIFF_BLESS=1` writes what came out into the file; review the difference.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use oxidiff::passes::Precision;
use oxidiff::plan::MemoryMode;
use support::{graph_of, plan_of, program_of};

const RULE: &str = "// ----\n";

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/plan");
    let files = fs::read_dir(root).expect("the golden folder is there");
    let mut cases: Vec<PathBuf> = files.map(|file| file.expect("readable").path()).collect();
    cases.sort();
    cases
}

/// The plan without the line that names the machine, and its arenas.
fn run(input: &str) -> String {
    let graph = graph_of(input);
    let samples = graph.sample_bindings();
    let program = program_of(graph.clone(), plan_of(graph, Precision::Eager, MemoryMode::Fast), "null");
    let plan = program.plan.to_string();
    let mut text = plan.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned());
    for bindings in samples {
        let specialized = program.specialize(&bindings).unwrap();
        text += &format!("arena at {bindings:?}:\n{}", specialized.workspace().text());
    }
    text
}

#[test]
fn plans_are_as_expected() {
    let bless = std::env::var_os("OXIDIFF_BLESS").is_some();
    let mut wrong = Vec::new();
    for path in cases() {
        let text = fs::read_to_string(&path).expect("readable");
        let (input, expected) = text.split_once(RULE).expect("a rule between graph and plan");
        let got = run(input);
        if bless {
            fs::write(&path, format!("{input}{RULE}{got}")).expect("writable");
        } else if got != expected {
            wrong.push(format!("{}:\n{got}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "OXIDIFF_BLESS=1 accepts these:\n{}", wrong.join("\n"));
}

#[test]
fn equal_sizes_are_shared_and_stay_what_they_are() {
    let mut counts = Vec::new();
    for case in cases() {
        let text = fs::read_to_string(&case).unwrap();
        let mut plan = plan_of(graph_of(text.split_once(RULE).unwrap().0), Precision::Eager, MemoryMode::Fast);
        let before = plan.to_string();
        let distinct = plan.share_sizes();
        assert_eq!(plan.to_string(), before, "{}", case.display());
        assert_eq!(plan.share_sizes(), distinct);
        counts.push(distinct);
    }
    assert!(counts.iter().any(|&distinct| distinct > 1), "{counts:?}");
}
