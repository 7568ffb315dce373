//! Every kernel of the registry against its reference.

use oxidiff_kernels::registry::rows;

#[test]
fn every_available_kernel_agrees_with_its_reference() {
    let failures: Vec<String> =
        rows().iter().filter(|row| (row.is_available)()).filter_map(|row| (row.verify)().err()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn names_follow_the_grammar_and_are_unique() {
    let rows = rows();
    for (index, row) in rows.iter().enumerate() {
        let (stem, isa) = row.name.split_once("__").expect("a name ends in its instruction set");
        assert_eq!(isa, row.isa.name(), "{}", row.name);
        assert!(stem.split('_').count() >= 3, "{}", row.name);
        assert!(rows[index + 1..].iter().all(|other| other.name != row.name), "{} twice", row.name);
    }
}

#[test]
fn every_kernel_is_measured_on_something() {
    for row in rows() {
        assert!(!row.benches.is_empty(), "{}", row.name);
        for bench in &row.benches {
            assert!(bench.bytes > 0.0 && bench.flops >= 0.0 && !bench.sizes.is_empty(), "{} {}", row.name, bench.op);
        }
    }
}

/// The operands that benches make are those that the kernels take.
#[test]
fn benches_run() {
    for row in rows().iter().filter(|row| (row.is_available)()) {
        let smallest = row.benches.iter().min_by(|a, b| (a.flops + a.bytes).total_cmp(&(b.flops + b.bytes)));
        let outcome = smallest.map(|bench| (bench.start)().and_then(|mut run| run()));
        assert!(matches!(outcome, Some(Ok(()))), "{}: {outcome:?}", row.name);
    }
}
