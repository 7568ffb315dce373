//! Artifacts, shared files and the tuning database: whatever a file holds is an error with a reason and nothing worse.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oxidiff::Error;
use oxidiff::ir;
use oxidiff::store::artifact::{self, Section};
use oxidiff::store::files;
use oxidiff::store::tuning::{Database, Entry, Key};

/// xorshift64*: the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// A copy with a few bytes changed, removed, doubled or made random.
    fn mutated(&mut self, data: &[u8]) -> Vec<u8> {
        let mut out = data.to_vec();
        for _ in 0..=self.below(4) {
            let at = self.below(out.len());
            match self.below(6) {
                0 => out.truncate(at),
                1 => {
                    let end = (at + self.below(64)).min(out.len());
                    out.drain(at..end);
                }
                2 => {
                    let end = (at + self.below(64)).min(out.len());
                    let piece = out[at..end].to_vec();
                    out.splice(at..at, piece);
                }
                _ if out.is_empty() => {}
                3 => out[at] = [0, 255, b'0', b'9', b'%', b'[', b','][self.below(7)],
                4 => out[at] ^= 1 << self.below(8),
                _ => out[at] = self.next() as u8,
            }
        }
        out
    }
}

/// A folder that goes with the test, in memory where the system has such a place: twenty thousand files on a disk take a
/// minute.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

fn folder(name: &str) -> Folder {
    let memory = PathBuf::from("/dev/shm");
    let path = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let path = path.join(format!("oxidiff-store-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a temporary folder");
    Folder(path)
}

const GRAPH: &str = "\
symbol s0 \"b\" = [2, 3, 1]
symbol s1 \"h\" = [8, 16, 24]
input 0 \"x\": f32[s0,4,s1,6]
parameter 0 \"weight\": f32[8,4,3,3]
path \"conv\"
%0: f32[s0,4,s1,6] = input() {index=0}
%1: f32[8,4,3,3] = parameter() {index=0}
";

fn sections() -> Vec<Section> {
    let section = |name: &str, data: &[u8]| Section { name: name.to_owned(), data: data.to_vec() };
    vec![section("about", b"{\"name\":\"Net\"}"), section("0.program", GRAPH.as_bytes()), section("empty", b"")]
}

#[test]
fn an_artifact_reads_back() {
    let file = artifact::encode(&sections()).expect("it can be written");
    assert_eq!(artifact::decode(&file).expect("it can be read"), sections());
    assert_eq!(artifact::decode(&artifact::encode(&[]).expect("nothing to write")).expect("nothing to read"), []);
}

#[test]
fn an_artifact_says_what_is_wrong_with_it() {
    let file = artifact::encode(&sections()).expect("it can be written");
    let why = |data: &[u8]| artifact::decode(data).expect_err("it is no artifact").to_string();
    assert!(why(b"").contains("too short"));
    assert!(why(&[b'x'; 400]).contains("another kind of file"));
    let mut newer = file.clone();
    newer[8] = 9;
    assert!(why(&newer).contains("version 9"));
    let mut flipped = file.clone();
    *flipped.last_mut().expect("a byte") ^= 1;
    assert!(why(&flipped).contains("checksum"));
    assert!(why(&file[..file.len() - 1]).contains("checksum"));
    let mut grown = file.clone();
    grown.push(0);
    artifact::seal(&mut grown);
    assert!(why(&grown).contains("behind its last section"));
    let mut shorter = file[..file.len() - 1].to_vec();
    artifact::seal(&mut shorter);
    assert!(why(&shorter).contains("longer than the file"));
    let twice = [sections(), sections()].concat();
    assert!(artifact::encode(&twice).expect_err("names are unique").to_string().contains("two sections"));
}

#[test]
fn mutated_artifacts_are_refused_or_read_whole() {
    let mut random = Random(7);
    let file = artifact::encode(&sections()).expect("it can be written");
    for round in 0..20_000 {
        let mut data = random.mutated(&file);
        if round % 2 == 0 {
            // What is inside must hold without the checksum too: somebody may write an artifact by hand.
            artifact::seal(&mut data);
        }
        match artifact::decode(&data) {
            Ok(read) => assert!(data == file || round % 2 == 0, "{} sections in spite of the checksum", read.len()),
            Err(Error::Artifact { .. }) => {}
            Err(other) => panic!("round {round}: {other}"),
        }
    }
}

/// Graphs that parse are verified; those that pass either compile or are refused.
#[test]
fn mutated_graphs_compile_or_are_refused() {
    let text = include_str!("golden/passes/propagate_layout/resnet.ir");
    let graph = text.split("// ----").next().expect("the input of a golden case");
    ir::parse_graph(graph).and_then(|g| ir::verify_graph(&g, "parse")).expect("the graph itself is right");
    let mut random = Random(11);
    let mut compiled = 0;
    for _ in 0..20_000 {
        let data = random.mutated(graph.as_bytes());
        let Ok(text) = String::from_utf8(data) else { continue };
        let Ok(graph) = ir::parse_graph(&text) else { continue };
        if ir::verify_graph(&graph, "parse").is_err() {
            continue;
        }
        let options = oxidiff::compiler::Options { backend: Some("cpu".to_owned()), ..Default::default() };
        if let Ok((program, _)) = oxidiff::compiler::compile(graph, &options) {
            for bindings in program.plan.graph.sample_bindings() {
                // Sizes were verified here; a refusal is a clean one.
                let _ = program.specialize(&bindings);
            }
            compiled += 1;
        }
    }
    assert!(compiled > 100, "the mutations leave too little to compile: {compiled}");
}

#[test]
fn a_file_is_replaced_whole() {
    let folder = folder("files");
    let path = folder.join("deep").join("file");
    assert_eq!(files::read(&path, 100).expect("no file is no error"), None);
    files::write(&path, b"one").expect("folders are made");
    files::write(&path, b"two").expect("files are replaced");
    assert_eq!(files::read(&path, 100).expect("it is there").as_deref(), Some(&b"two"[..]));
    assert!(files::read(&path, 2).expect_err("a bound").to_string().contains("more than 2 bytes"));
    let below = path.join("below a file");
    assert!(matches!(files::write(&below, b"x"), Err(Error::Cache { .. })));
    assert_eq!(std::fs::read_dir(folder.join("deep")).expect("a folder").count(), 1, "nothing is left behind");
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_what_is_no_file_is_left_alone() {
    let folder = folder("links");
    let (file, link, other) = (folder.join("file"), folder.join("link"), folder.join("other"));
    std::os::unix::fs::symlink("file", &link).expect("it links");
    std::os::unix::fs::symlink(&link, &other).expect("it links");
    for (path, data) in [(&link, b"one"), (&other, b"two"), (&file, b"six")] {
        files::write(path, data).expect("it writes");
        assert!(std::fs::symlink_metadata(&link).expect("it is there").is_symlink());
        assert_eq!(std::fs::read(&file).expect("it reads"), data);
        assert_eq!(files::read(path, 3).expect("it reads"), Some(data.to_vec()));
    }
    let circle = folder.join("circle");
    std::os::unix::fs::symlink("circle", &circle).expect("it links");
    let socket = folder.join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("it binds");
    for path in [&*folder, &socket] {
        for error in [files::write(path, b"data").unwrap_err(), files::read(path, 9).unwrap_err()] {
            assert!(error.to_string().contains("is no file"), "{error}");
        }
        assert!(!std::fs::metadata(path).expect("it is there").is_file());
    }
    assert!(files::read(&circle, 9).is_err());
}

#[test]
fn a_lock_keeps_others_out_until_it_is_dropped() {
    let folder = folder("lock");
    let path = folder.join("lock");
    let held = files::Lock::take(&path, Duration::ZERO).expect("it is free");
    let refused = files::Lock::take(&path, Duration::from_millis(20)).expect_err("it is held");
    assert!(refused.to_string().contains("locked"));
    drop(held);
    files::Lock::take(&path, Duration::ZERO).expect("it is free again");
}

/// To open a pipe for writing waits for somebody who reads it.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_lock() {
    let folder = folder("pipe");
    let pipe = folder.join("lock");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("it runs").success());
    let (done, outcome) = std::sync::mpsc::channel();
    std::thread::spawn(move || done.send(files::Lock::take(&pipe, Duration::ZERO).map(drop)));
    let outcome = outcome.recv_timeout(Duration::from_secs(20)).expect("nobody is waited for");
    assert!(outcome.expect_err("it is no file").to_string().contains("is no file"));
}

fn entry(op: &str, choice: &str, measured_at: i64) -> Entry {
    let text = str::to_owned;
    let key = Key { op: text(op), bucket: text("m 4096"), device: text("cpu"), library: text("1") };
    Entry { key, choice: text(choice), seconds: 0.25, default_seconds: 0.5, workspace_bytes: 64, measured_at }
}

#[test]
fn the_database_remembers() {
    let folder = folder("tuning");
    let path = folder.join("tuning.sqlite");
    let database = Database::open(&path).expect("it is made");
    database.add(&[entry("linear", "slow", 5), entry("conv", "winograd", 5)]).expect("it can be written");
    database.add(&[entry("linear", "fast", 6), entry("conv", "direct", 4)]).expect("it can be written");
    let again = Database::open(&path).expect("two may have it open");
    assert_eq!(again.find(&entry("linear", "", 0).key).expect("it reads"), Some(entry("linear", "fast", 6)));
    assert_eq!(again.find(&entry("conv", "", 0).key).expect("it reads"), Some(entry("conv", "winograd", 5)));
    assert_eq!(again.find(&entry("norm", "", 0).key).expect("it reads"), None);
    let shipped = Database::open_read_only(&path).expect("it can be shipped");
    assert_eq!(shipped.entries().expect("it reads").len(), 2);
    assert!(matches!(shipped.add(&[entry("norm", "x", 7)]), Err(Error::Cache { .. })));
    again.clear().expect("it can be written");
    assert_eq!(database.entries().expect("it reads"), []);
}

#[test]
fn many_writers_lose_nothing() {
    let folder = folder("writers");
    let path = folder.join("tuning.sqlite");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let database = Database::open(path).expect("it is made once");
                for i in 0..25 {
                    database.add(&[entry(&format!("{writer} {i}"), "x", 1)]).expect("writers wait for each other");
                }
            });
        }
    });
    assert_eq!(Database::open(&path).expect("it is whole").entries().expect("it reads").len(), 100);
}

#[test]
fn a_damaged_database_is_moved_aside() {
    let folder = folder("damaged");
    let path = folder.join("tuning.sqlite");
    std::fs::write(&path, b"no database at all, but long enough to be taken for one by its length alone")
        .expect("a file");
    let database = Database::open(&path).expect("it is begun anew");
    assert!(database.complaint.as_deref().is_some_and(|c| c.contains("begun anew")));
    assert!(path.with_extension("damaged").exists());
    database.add(&[entry("linear", "x", 1)]).expect("it can be written");
    assert!(Database::open(&path).expect("it is whole").complaint.is_none());
}

#[test]
fn mutated_databases_are_read_or_refused() {
    let folder = folder("mutated");
    let path = folder.join("tuning.sqlite");
    let original = Database::open(&path).expect("it is made");
    let rows: Vec<Entry> = (0..40).map(|i| entry(&format!("op {i}"), "choice", i)).collect();
    original.add(&rows).expect("it can be written");
    drop(original);
    let whole = std::fs::read(&path).expect("a file");
    let mut random = Random(13);
    for round in 0..20_000 {
        std::fs::write(&path, random.mutated(&whole)).expect("a file");
        // Beginning anew waits for the disk: a minute, if every damaged file did it.
        let database = if round % 16 == 0 { Database::open(&path) } else { Database::open_read_only(&path) };
        match database {
            Ok(database) => {
                for result in [database.entries().map(|_| ()), database.find(&rows[7].key).map(|_| ())] {
                    assert!(matches!(result, Ok(()) | Err(Error::Cache { .. })));
                }
            }
            Err(Error::Cache { .. }) => {}
            Err(other) => panic!("round {round}: {other}"),
        }
    }
}

/// A writer that was killed while it wrote leaves a journal: whoever opens the file next, if only to read, gets what was
/// committed.
#[test]
fn what_a_killed_writer_left_is_rolled_back_by_a_reader() {
    let folder = folder("hot-journal");
    let path = folder.join("tuning.sqlite");
    Database::open(&path).expect("it is made").add(&[entry("linear", "x", 1)]).expect("it can be written");
    let connection = rusqlite::Connection::open(&path).expect("it opens");
    connection
        .execute_batch("PRAGMA cache_size = 1; PRAGMA cache_spill = 1; BEGIN IMMEDIATE")
        .expect("it can be locked");
    for i in 0..2000 {
        let insert = "INSERT INTO choices VALUES (?1, 'b', 'd', 'l', 'c', 1.0, 2.0, 0, 0)";
        connection.execute(insert, [format!("{i:0>200}")]).expect("a row");
    }
    // The files as the writer leaves them if it is killed now.
    let copy = folder.join("copy.sqlite");
    std::fs::copy(&path, &copy).expect("a file");
    std::fs::copy(folder.join("tuning.sqlite-journal"), folder.join("copy.sqlite-journal")).expect("a journal");
    assert!(std::fs::metadata(&copy).expect("a file").len() > 100_000, "nothing was written yet");
    let rows = Database::open_read_only(&copy).expect("it is rolled back").entries().expect("it reads");
    assert_eq!(rows, [entry("linear", "x", 1)]);
}

#[test]
fn rows_that_are_no_measurements_are_none() {
    let path = folder("rows").join("tuning.sqlite");
    let database = Database::open(&path).expect("it is made");
    let good = entry("linear", "x", 1);
    let long = Entry { choice: "x".repeat(5000), ..entry("long", "x", 1) };
    let never = Entry { seconds: f64::INFINITY, ..entry("never", "x", 1) };
    database.add(&[good.clone(), long, never]).expect("it can be written");
    let connection = rusqlite::Connection::open(&path).expect("it opens");
    let count: i64 = connection.query_row("SELECT count(*) FROM choices", [], |row| row.get(0)).expect("a count");
    assert_eq!(count, 1, "they are not written");
    for row in [
        "('zero', 'b', 'd', 'l', 'c', 1.0, 0.0, 0, 0)",
        "('less', 'b', 'd', 'l', 'c', -1.0, 1.0, 0, 0)",
        "('infinite', 'b', 'd', 'l', 'c', 9e999, 1.0, 0, 0)",
        "('a word', 'b', 'd', 'l', 'c', 'fast', 1.0, 0, 0)",
        "(CAST(x'ff00fe' AS TEXT), 'b', 'd', 'l', 'c', 1.0, 1.0, 0, 0)",
    ] {
        connection.execute(&format!("INSERT INTO choices VALUES {row}"), []).expect("a row");
    }
    assert_eq!(database.entries().expect("it reads"), std::slice::from_ref(&good));
    assert_eq!(database.find(&good.key).expect("it reads"), Some(good));
    assert_eq!(database.find(&entry("zero", "x", 1).key).expect("it reads"), None);
}

/// Two versions may share a folder: neither moves the other's file aside.
#[test]
fn a_database_of_another_schema_is_left_alone() {
    let path = folder("schema").join("tuning.sqlite");
    Database::open(&path).expect("it is made").add(&[entry("linear", "x", 1)]).expect("it can be written");
    let connection = rusqlite::Connection::open(&path).expect("it opens");
    connection.pragma_update(None, "user_version", 2).expect("it can be written");
    let before = std::fs::read(&path).expect("a file");
    let error = Database::open(&path).expect_err("it is another version's").to_string();
    assert!(error.contains("schema 2"), "{error}");
    assert!(!path.with_extension("damaged").exists());
    assert_eq!(std::fs::read(&path).expect("a file"), before);
}
