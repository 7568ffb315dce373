//! Where the memory of a plan's buffers comes from, as far as it depends on no sizes: made once per program.

use super::read_through::{self, Pair};
use super::run::whole_parameter;
use crate::Result;
use crate::memory::{self, ALIGN_BYTES, Request};
use crate::plan::liveness::{self, LiveRange, live_ranges};
use crate::plan::{BufferId, BufferKind, Plan};

/// The buffers of a plan by whose memory they are.
pub(super) struct Places {
    /// Buffer and argument.
    pub inputs: Vec<(usize, usize)>,
    /// Buffer and weight slot.
    pub parameters: Vec<(usize, usize)>,
    /// Buffer and constant.
    pub constants: Vec<(usize, usize)>,
    /// Buffer and result.
    pub outputs: Vec<(usize, usize)>,
    /// Buffers computed from weights alone that runs read, and where each starts in the block that holds them all.
    pub derived: Vec<(usize, usize)>,
    /// Size of that block.
    pub derived_bytes: usize,
    /// Buffers that only lead to those, and where each starts in a block that goes once they are there.
    pub passing: Vec<(usize, usize)>,
    /// Size of that block.
    pub passing_bytes: usize,
    /// By buffer: whether a step reads the buffer itself, not only a packed form of it.
    pub read: Vec<bool>,
    /// Workspace, and the steps it is needed for.
    pub arena: Vec<(BufferId, LiveRange)>,
    /// Norms that convolutions may read through.
    pub pairs: Vec<Pair>,
}

impl Places {
    pub fn of(plan: &Plan) -> Result<Self> {
        let of = |pick: fn(BufferKind) -> Option<u32>| -> Vec<(usize, usize)> {
            let buffers = plan.buffers.iter().enumerate();
            buffers.filter_map(|(at, b)| pick(b.kind).map(|index| (at, index as usize))).collect()
        };
        let (mut derived, mut derived_bytes) = (Vec::new(), 0usize);
        let (mut passing, mut requests) = (Vec::new(), Vec::new());
        let [made, used] = [&plan.prepare, &plan.steps].map(|steps| live_ranges(steps, plan.buffers.len()));
        for (id, buffer) in plan.buffers_of(|kind| kind == BufferKind::Derived) {
            let bytes = usize::try_from(buffer.numel.eval(&[])?).unwrap_or(0) * buffer.dtype.size_bytes();
            match made[id.index()] {
                Some(LiveRange { first, last }) if used[id.index()].is_none() => {
                    passing.push(id.index());
                    requests.push(Request { bytes, first, last });
                }
                _ => {
                    derived.push((id.index(), derived_bytes));
                    derived_bytes += bytes.next_multiple_of(ALIGN_BYTES);
                }
            }
        }
        let layout = memory::solve(&requests)?;
        Ok(Self {
            inputs: of(|k| if let BufferKind::Input(i) = k { Some(i) } else { None }),
            parameters: of(|k| if let BufferKind::Parameter(i) = k { Some(i) } else { None }),
            constants: of(|k| if let BufferKind::Constant(i) = k { Some(i) } else { None }),
            outputs: of(|k| if let BufferKind::Output(i) = k { Some(i) } else { None }),
            derived,
            derived_bytes,
            passing: passing.into_iter().zip(layout.offsets).collect(),
            passing_bytes: layout.bytes,
            read: read_buffers(plan),
            arena: liveness::arena(plan),
            pairs: read_through::pairs(plan),
        })
    }
}

/// Buffers that are read where they lie. The weight of a step that packs, if it is a whole parameter, may have
/// any strides.
fn read_buffers(plan: &Plan) -> Vec<bool> {
    let mut read = vec![false; plan.buffers.len()];
    for step in plan.prepare.iter().chain(&plan.steps) {
        let packed = step.pack.filter(|_| whole_parameter(plan, &step.operands[1]).is_some()).map(|_| 1);
        let operands = step.operands.iter().enumerate().filter(|(at, _)| Some(*at) != packed).map(|(_, a)| a);
        operands.chain(&step.loads).for_each(|a| read[a.buffer.index()] = true);
    }
    read
}
