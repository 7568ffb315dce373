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
