//! The verifier of groups accepts what `form_groups` makes and names what is broken.

use oxidiff::ir::{Graph, ValueId, parse_graph};
use oxidiff::kernel_ir::{Group, GroupKind, Instr, Reg, print, verify};
use oxidiff::passes::{PassCtx, Precision, form_groups};

const GRAPH: &str = r#"symbol s0 "batch" = [2, 3]
input 0 "x": f16[s0,8]
parameter 0 "w": f16[8,8]
%0: f16[s0,8] = input() {index=0}
%1: f16[8,8] = parameter() {index=0}
%2: f16[s0,8] = linear(%0, %1)
%3: f16[s0,8] = silu(%2)
%4: f16[s0,8] = add(%3, %0)
%5: f16[8,s0] = permute(%4) {dims=[1, 0]}
return %5, %3
"#;

fn groups() -> (Graph, Vec<Group>) {
    let graph = parse_graph(GRAPH).unwrap();
    let groups = form_groups(&graph, &PassCtx { precision: Precision::Fast, ..PassCtx::default() }).unwrap();
    verify(&graph, &groups).unwrap();
    (graph, groups)
}

#[track_caller]
fn refused(breaks: impl FnOnce(&mut Vec<Group>), why: &str) {
    let (graph, mut groups) = groups();
    breaks(&mut groups);
    let message = verify(&graph, &groups).expect_err(why).to_string();
    assert!(message.contains(why), "{message}");
}

fn contraction(groups: &mut [Group]) -> &mut Group {
    groups.iter_mut().find(|g| g.kind == GroupKind::Contraction).unwrap()
}

#[test]
fn results_are_the_values_that_leave_the_group() {
    let (graph, mut groups) = groups();
    assert_eq!(contraction(&mut groups).results(), [ValueId(3), ValueId(4)]);
    let text = print(&graph, &groups);
    assert!(text.contains("store r1 -> %3: f16[s0,8]"), "{text}");
}

#[test]
fn a_node_is_in_exactly_one_group() {
    refused(|groups| groups.push(groups[0].clone()), "%0 is in two groups");
    refused(|groups| groups.truncate(groups.len() - 1), "%5 is in no group");
}

#[test]
fn a_group_runs_after_what_it_reads() {
    refused(|groups| groups.rotate_left(1), "makes later");
}

#[test]
fn roots_suit_kinds() {
    refused(|groups| contraction(groups).kind = GroupKind::Norm, "does not suit");
    refused(|groups| contraction(groups).root = None, "does not suit");
}

#[test]
fn bodies_are_well_formed() {
    refused(|groups| contraction(groups).body.space.clear(), "the space is not the shape");
    refused(
        |groups| contraction(groups).body.instrs[0] = Instr::Unary(oxidiff::ir::UnaryOp::Neg, Reg(0)),
        "r0 is not valid",
    );
    refused(|groups| contraction(groups).body.instrs[0] = Instr::Load(ValueId(3)), "r0 is not valid");
    refused(|groups| contraction(groups).body.stores[0].0 = Reg(99), "does not fit");
    refused(|groups| contraction(groups).body.stores.clear(), "nothing is stored");
}

#[test]
fn what_leaves_a_group_is_stored() {
    refused(
        |groups| {
            contraction(groups).body.stores.remove(1);
        },
        "%4 is read outside but not stored",
    );
    refused(
        |groups| {
            contraction(groups).body.stores.remove(0);
        },
        "output %3 is not stored",
    );
}
