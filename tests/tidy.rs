//! Rules of this repository that the compiler does not check: layers, places for Python, the environment and `unsafe`,
//! and lists that must agree with each other. Each failure names the file and line.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules of `src`, low to high, as `ARCHITECTURE.md` lists them. A module uses its own rank or a lower one.
const LAYERS: &[&[&str]] = &[
    &["error", "config", "trace", "target"],
    &["store"],
    &["ir"],
    &["kernel_ir"],
    &["analysis"],
    &["passes"],
    &["codegen"],
    &["select"],
    &["memory"],
    &["plan"],
    &["backend"],
    &["runtime", "compiler"],
    &["python", "bin"],
];

/// Variables that only the test suite reads.
const TEST_VARIABLES: &[&str] =
    &["OXIDIFF_BLESS", "OXIDIFF_CUDA_ARCHS", "OXIDIFF_CUDA_SCHEDULES", "OXIDIFF_CUDNN_DEVICES"];

/// Entry points of `src/python` that hand out or put down a value, and cannot panic: by file, their names.
const UNSHIELDED: &[(&str, &str)] = &[
    ("builder", "new symbol add_parameter path output signature"),
    ("executable", "hash compile_s shared_with devices stamp derived_bytes"),
    ("lib", "is_on knobs"),
    ("sites", "op bucket count kept expected chosen installed candidates name"),
    ("store", "cache_dir release __enter__ __exit__ complaint"),
    ("surroundings", "__traverse__"),
    ("tree", "form floats fingerprint is_listed_changed kept has_other_adapters obstacle dicts copies"),
    ("tree", "own_tensors tensors modules layers parents __traverse__"),
    ("tune", "op bucket count kept flops name forget_choices"),
    ("watch", "covers __traverse__"),
];

/// One line of code, without comments, of a part of a file that is not a test.
struct Line {
    path: PathBuf,
    number: usize,
    code: String,
}

impl Line {
    fn place(&self) -> String {
        format!("{}:{}", self.path.display(), self.number)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files under `folder` (relative to the repository) with one of `extensions`, relative, in order.
fn files(folder: &str, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.map(|entry| entry.expect("readable folder").path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && name != "__pycache__" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if extensions.iter().any(|extension| path.extension().is_some_and(|e| e == *extension)) {
                found.push(path.strip_prefix(root()).expect("inside the repository").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Code of the Rust files under `folder`, without comments and without unit tests, which close their file.
fn code(folder: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    for path in files(folder, &["rs"]) {
        let text = fs::read_to_string(root().join(&path)).expect("readable file");
        for (index, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("#[cfg(test)]") && follows_test_module(&text, index) {
                break;
            }
            let code = line.split("//").next().unwrap_or_default();
            lines.push(Line { path: path.clone(), number: index + 1, code: code.to_owned() });
        }
    }
    lines
}

fn follows_test_module(text: &str, index: usize) -> bool {
    text.lines().skip(index + 1).find(|line| !line.trim_start().starts_with("#[")).is_some_and(|l| l.contains("mod "))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `word` stands in `code` as a word of its own.
fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

fn fails(rule: &str, failures: &[String]) {
    assert!(failures.is_empty(), "{rule}:\n  {}\n", failures.join("\n  "));
}

/// The first word of each path behind `crate::` in `code`, groups in braces included.
fn crate_paths(code: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, matched) in code.match_indices("crate::") {
        let rest = &code[at + matched.len()..];
        if !rest.starts_with('{') {
            names.push(rest.chars().take_while(|&c| is_word(c)).collect());
            continue;
        }
        let (mut depth, mut word, mut done) = (0, String::new(), false);
        for c in rest.chars() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => (word, done) = (String::new(), false),
                c if depth == 1 && !done && is_word(c) => word.push(c),
                _ => {}
            }
            if depth == 1 && c == ':' && !done {
                names.push(word.clone());
                done = true;
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

fn rank(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

#[test]
fn layers_point_one_way() {
    let mut sources: BTreeMap<PathBuf, String> = BTreeMap::new();
    for line in code("src") {
        let text = sources.entry(line.path).or_default();
        text.push_str(&line.code);
        text.push('\n');
    }
    let mut failures = Vec::new();
    for (path, text) in &sources {
        let inside = path.strip_prefix("src").expect("under src");
        let module = inside.components().next().expect("a name").as_os_str().to_string_lossy().replace(".rs", "");
        if module == "lib" {
            continue;
        }
        let Some(own) = rank(&module) else {
            failures.push(format!("{}: module `{module}` is in no layer", path.display()));
            continue;
        };
        for used in crate_paths(text) {
            if rank(&used).is_some_and(|other| other > own) {
                failures.push(format!("{}: `{module}` uses the higher layer `{used}`", path.display()));
            }
        }
    }
    fails("layers point one way", &failures);
}

#[test]
fn crate_paths_are_found() {
    assert_eq!(crate_paths("use crate::ir::Graph;"), ["ir"]);
    assert_eq!(crate_paths("use crate::{\n  ir::{Graph, Op},\n error::Error };"), ["ir", "error"]);
}

#[test]
fn backends_do_not_name_each_other() {
    let mut failures = Vec::new();
    for (folder, other) in [("src/backend/cpu", "cuda"), ("src/backend/cuda", "cpu")] {
        for line in code(folder) {
            if line.code.contains(&format!("backend::{other}")) || line.code.contains(&format!("super::{other}")) {
                failures.push(line.place());
            }
        }
    }
    fails("one backend names the other", &failures);
}

#[test]
fn kernels_are_a_leaf() {
    let manifest = read("kernels/Cargo.toml");
    let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
    let own = dependencies.lines().take_while(|line| !line.starts_with('['));
    let failures: Vec<_> =
        own.filter(|line| line.contains("oxidiff") || line.contains("path")).map(String::from).collect();
    fails("kernels/ depends on nothing of this repository", &failures);
}

/// Cargo does not compile this library for tests: one in its sources would never run.
#[test]
fn tests_of_kernels_are_in_their_folder() {
    let mut failures = Vec::new();
    for path in files("kernels/src", &["rs"]) {
        let text = fs::read_to_string(root().join(&path)).expect("readable file");
        let is_test = |line: &str| line.starts_with("#[test]") || line.starts_with("#[cfg") && has_word(line, "test");
        for (index, _) in text.lines().enumerate().filter(|(_, line)| is_test(line.trim_start())) {
            failures.push(format!("{}:{}", path.display(), index + 1));
        }
    }
    fails("tests of kernels/ are in kernels/tests", &failures);
}

#[test]
fn python_stays_in_its_folder() {
    let mut lines = code("src");
    lines.extend(code("kernels"));
    let allowed = |line: &Line| line.path.starts_with("src/python");
    let failures: Vec<_> =
        lines.iter().filter(|line| has_word(&line.code, "pyo3") && !allowed(line)).map(Line::place).collect();
    fails("only src/python names pyo3", &failures);
}

#[test]
fn environment_is_read_in_one_file() {
    let calls = ["env::var", "env::vars", "env::set_var", "env::remove_var"];
    let mut lines = code("src");
    lines.extend(code("kernels/src"));
    let failures: Vec<_> = lines
        .iter()
        .filter(|line| line.path != Path::new("src/config.rs") && calls.iter().any(|call| line.code.contains(call)))
        .map(Line::place)
        .collect();
    fails("only src/config.rs reads the environment", &failures);
}

#[test]
fn unsafe_stays_in_its_places() {
    // `Executable::run` takes addresses from its caller and hands them on with the same contract.
    let places = ["src/backend", "src/python", "src/runtime/executable.rs"];
    let failures: Vec<_> = code("src")
        .iter()
        .filter(|line| !places.iter().any(|place| line.path.starts_with(place)))
        .filter(|line| has_word(&line.code, "unsafe"))
        .map(Line::place)
        .collect();
    fails("unsafe lives in src/backend, src/python and kernels alone", &failures);
}

/// Name and text of each function of a file that Python calls.
fn entry_points(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let (mut is_methods, mut is_function) = (false, false);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let indent = if is_methods { "    " } else { "" };
        is_methods = line.starts_with("#[pymethods]") || (is_methods && line != "}");
        is_function |= line.starts_with("#[pyfunction");
        let code = line.strip_prefix(indent).unwrap_or(line);
        let words: Vec<&str> = code.split(' ').take_while(|word| *word != "fn").collect();
        let is_head = code.starts_with(|c: char| c.is_ascii_lowercase()) && words.len() < code.split(' ').count();
        if !(is_head && (is_methods || is_function)) {
            continue;
        }
        is_function = false;
        let name = code.split("fn ").nth(1).unwrap_or_default();
        let name = name.split(['(', '<']).next().unwrap_or_default().to_owned();
        let end = format!("{indent}}}");
        let body: Vec<&str> = lines.by_ref().take_while(|line| *line != end).collect();
        found.push((name, body.join("\n")));
    }
    found
}

/// A panic that crosses into Python is no exception that users catch.
#[test]
fn entry_points_are_shielded() {
    let (mut failures, mut seen, mut count) = (Vec::new(), BTreeSet::new(), 0);
    for path in files("src/python", &["rs"]) {
        let file = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for (name, body) in entry_points(&read(&path.to_string_lossy())) {
            count += 1;
            let is_listed =
                UNSHIELDED.iter().any(|(at, names)| *at == file && names.split(' ').any(|listed| listed == name));
            if body.contains("guarded(") || body.contains("shielded(") {
                continue;
            }
            seen.insert((file.clone(), name.clone()));
            if !is_listed {
                failures.push(format!("{}: {name}", path.display()));
            }
        }
    }
    let listed = UNSHIELDED.iter().flat_map(|(file, names)| names.split(' ').map(move |name| (*file, name)));
    let gone = listed.filter(|(file, name)| !seen.contains(&((*file).to_owned(), (*name).to_owned())));
    failures.extend(gone.map(|(file, name)| format!("{file}: {name} is listed and need not be")));
    assert!(count > 90, "{count} entry points");
    fails("an entry point that goes through neither `guarded` nor `shielded`", &failures);
}

#[test]
fn nothing_unfinished_and_no_unwrap() {
    let mut lines = code("src");
    lines.extend(code("kernels/src"));
    let unfinished = [".unwrap()", "todo!(", "unimplemented!(", "dbg!("];
    let mut failures: Vec<_> = lines
        .iter()
        .filter(|line| unfinished.iter().any(|call| line.code.contains(call)))
        .map(|line| format!("{}: {}", line.place(), line.code.trim()))
        .collect();
    for folder in ["src", "kernels", "python", "examples", "benches"] {
        for path in files(folder, &["rs", "py", "pyi"]) {
            let text = fs::read_to_string(root().join(&path)).expect("readable file");
            for (index, line) in text.lines().enumerate() {
                if ["TODO", "FIXME", "XXX"].iter().any(|mark| has_word(line, mark)) {
                    failures.push(format!("{}:{}: {}", path.display(), index + 1, line.trim()));
                }
            }
        }
    }
    fails("unfinished code, or an unwrap outside tests", &failures);
}

#[test]
fn every_module_says_what_it_is_for() {
    let mut failures = Vec::new();
    for folder in ["src", "kernels/src"] {
        for path in files(folder, &["rs"]) {
            let text = fs::read_to_string(root().join(&path)).expect("readable file");
            if !text.starts_with("//!") {
                failures.push(path.display().to_string());
            }
        }
    }
    for path in files("python/oxidiff", &["py"]) {
        let text = fs::read_to_string(root().join(&path)).expect("readable file");
        if !text.starts_with("\"\"\"") {
            failures.push(path.display().to_string());
        }
    }
    fails("a module starts with a comment on its purpose", &failures);
}

/// Names of the passes: files of `src/passes` that define a `PASS`, and `form_groups`, whose result is no graph.
fn pass_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in code("src/passes") {
        if line.code.contains("pub const PASS:") || line.code.starts_with("pub fn form_groups(") {
            names.insert(line.path.file_stem().expect("a file").to_string_lossy().into_owned());
        }
    }
    names
}

#[test]
fn every_pass_has_golden_cases_and_a_row() {
    let passes = pass_names();
    if passes.is_empty() {
        return;
    }
    let mut tested = BTreeSet::new();
    for path in files("tests/golden/passes", &["ir"]) {
        tested.insert(path.parent().expect("a folder").file_name().expect("a name").to_string_lossy().into_owned());
    }
    let documented = read("docs/passes.md");
    let mut failures = Vec::new();
    for name in &passes {
        if !tested.contains(name) {
            failures.push(format!("{name}: no case in tests/golden/passes/{name}"));
        }
        if !documented.contains(&format!("`{name}`")) {
            failures.push(format!("{name}: no row in docs/passes.md"));
        }
    }
    failures.extend(tested.difference(&passes).map(|name| format!("tests/golden/passes/{name}: no such pass")));
    fails("passes, golden folders and docs/passes.md agree", &failures);
}

/// `(name, default, meaning)` of every knob in `src/config.rs`.
fn knobs() -> Vec<[String; 3]> {
    let source = read("src/config.rs");
    let field = |text: &str, name: &str| {
        let rest = text.split_once(&format!("{name}: \"")).map(|(_, rest)| rest)?;
        rest.split_once('"').map(|(value, _)| value.to_owned())
    };
    source
        .split("Knob {")
        .skip(1)
        .filter_map(|text| Some([field(text, "name")?, field(text, "default")?, field(text, "doc")?]))
        .filter(|[name, ..]| name.starts_with("OXIDIFF_"))
        .collect()
}

#[test]
fn environment_table_is_the_list_in_config() {
    let documented: Vec<[String; 3]> = read("docs/environment.md")
        .lines()
        .filter(|line| line.starts_with("| `OXIDIFF_"))
        .map(|line| {
            let cells: Vec<_> = line.split('|').map(|cell| cell.trim().trim_matches('`').to_owned()).collect();
            [cells[1].clone(), cells[2].clone(), cells[3].clone()]
        })
        .collect();
    let declared = knobs();
    assert!(!declared.is_empty(), "src/config.rs declares no knob: was its table renamed?");
    let row = |[name, default, doc]: &[String; 3]| format!("| `{name}` | {default} | {doc} |");
    let missing: Vec<_> = declared.iter().filter(|knob| !documented.contains(knob)).map(row).collect();
    let extra: Vec<_> = documented.iter().filter(|knob| !declared.contains(knob)).map(row).collect();
    fails("rows missing from docs/environment.md", &missing);
    fails("rows of docs/environment.md that src/config.rs does not declare", &extra);
}

#[test]
fn every_variable_named_is_declared() {
    let mut known: BTreeSet<String> = knobs().into_iter().map(|[name, ..]| name).collect();
    known.extend(TEST_VARIABLES.iter().map(ToString::to_string));
    let mut failures = Vec::new();
    let mut paths = vec![PathBuf::from("README.md"), "CONTRIBUTING.md".into(), "Makefile".into()];
    for folder in ["src", "kernels/src", "python", "docs", "examples", "benches"] {
        paths.extend(files(folder, &["rs", "py", "pyi", "md"]));
    }
    for path in paths {
        let text = fs::read_to_string(root().join(&path)).expect("readable file");
        for (at, matched) in text.match_indices("OXIDIFF_") {
            let rest: String = text[at + matched.len()..].chars().take_while(|&c| is_word(c)).collect();
            let name = format!("{matched}{rest}");
            if !rest.is_empty() && !known.contains(&name) {
                failures.push(format!("{}: {name}", path.display()));
            }
        }
    }
    fails("variables that src/config.rs does not declare", &failures);
}
