//! Where the memory of a plan's buffers comes from, as far as it depends on no sizes: made once per program.

use super::run::whole_parameter;
use crate::Result;
use crate::memory::ALIGN_BYTES;
use crate::plan::liveness::{self, LiveRange};
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
    /// Buffers computed from weights alone, and where each starts in the block that holds them all.
    pub derived: Vec<(usize, usize)>,
    /// Size of that block.
    pub derived_bytes: usize,
    /// By buffer: whether a step reads the buffer itself, not only a packed form of it.
    pub read: Vec<bool>,
    /// Workspace, and the steps it is needed for.
    pub arena: Vec<(BufferId, LiveRange)>,
}

impl Places {
    pub fn of(plan: &Plan) -> Result<Self> {
        let of = |pick: fn(BufferKind) -> Option<u32>| -> Vec<(usize, usize)> {
            let buffers = plan.buffers.iter().enumerate();
            buffers.filter_map(|(at, b)| pick(b.kind).map(|index| (at, index as usize))).collect()
        };
        let (mut derived, mut derived_bytes) = (Vec::new(), 0usize);
        for (id, buffer) in plan.buffers_of(|kind| kind == BufferKind::Derived) {
            derived.push((id.index(), derived_bytes));
            let bytes = usize::try_from(buffer.numel.eval(&[])?).unwrap_or(0) * buffer.dtype.size_bytes();
            derived_bytes += bytes.next_multiple_of(ALIGN_BYTES);
        }
        Ok(Self {
            inputs: of(|k| if let BufferKind::Input(i) = k { Some(i) } else { None }),
            parameters: of(|k| if let BufferKind::Parameter(i) = k { Some(i) } else { None }),
            constants: of(|k| if let BufferKind::Constant(i) = k { Some(i) } else { None }),
            outputs: of(|k| if let BufferKind::Output(i) = k { Some(i) } else { None }),
            derived,
            derived_bytes,
            read: read_buffers(plan),
            arena: liveness::arena(plan),
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
