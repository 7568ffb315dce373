//! Scaled dot product attention.

use oxidiff_kernels::cpu::attention::{Attention, Heads, MAX_DIM, Mask, attention, attention_in, scratch_bytes};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::pool::Pool;

use super::product::float_type;
use super::run::{Call, Ctx, Slot};
use super::specialize::{Maker, Operand};
use super::{interpret, kernel_error};
use crate::Result;
use crate::codegen::tile::kernel_type;
use crate::ir::Op;

struct AttentionCall {
    /// Pointers are null until a run fills in its own copy.
    shape: Attention,
    q: Slot,
    k: Slot,
    v: Slot,
    mask: Option<Slot>,
    out: Slot,
    scratch: (Slot, usize),
}

// SAFETY: the pointers in `shape` are null.
unsafe impl Send for AttentionCall {}
// SAFETY: as above.
unsafe impl Sync for AttentionCall {}

/// Sizes (batch, heads) of the leading dimensions of all operands together, and the strides of one operand along them.
struct Leading {
    sizes: [usize; 2],
}

impl Leading {
    /// `None` for more than two leading dimensions: those that matter would have to be merged first.
    fn of(operands: &[&Operand]) -> Option<Self> {
        let mut sizes = [1, 1];
        for o in operands {
            let lead = o.access.shape.len().checked_sub(2)?;
            let (extra, own) = o.access.shape[..lead].split_at(lead.saturating_sub(2));
            if extra.iter().any(|&d| d != 1) {
                return None;
            }
            for (size, &d) in sizes[2 - own.len()..].iter_mut().zip(own) {
                *size = if *size == 1 { d } else { *size };
            }
        }
        Some(Self { sizes })
    }

    /// Strides over (batch, heads, rows, columns); dimensions of size 1 are broadcast.
    fn strides(&self, o: &Operand) -> [isize; 4] {
        let mut strides = [0; 4];
        let rank = o.access.shape.len();
        for (at, stride) in strides.iter_mut().enumerate() {
            if let Some(own) = (at + rank).checked_sub(4)
                && o.access.shape[own] != 1
            {
                *stride = o.access.strides[own];
            }
        }
        strides
    }
}

pub(super) fn make(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let Some(Op::ScaledDotProductAttention { is_causal, scale }) = step.root.map(|root| maker.plan().graph.op(root))
    else {
        return maker.refuse("an attention step without an attention");
    };
    let operands = maker.operands()?;
    let out = maker.operand(&step.stores[0])?;
    let [q, k, v, rest @ ..] = operands.as_slice() else { return maker.refuse("an attention has three operands") };
    let size = |o: &Operand, back: usize| o.access.shape[o.access.shape.len() - back];
    let mask_type = rest.first().and_then(|m| kernel_type(m.access.dtype));
    let is_mask = |t: KernelType| matches!(t, KernelType::Bool | KernelType::F32 | KernelType::F16 | KernelType::BF16);
    let supported =
        size(q, 1) <= MAX_DIM && size(v, 1) <= MAX_DIM && (rest.is_empty() || mask_type.is_some_and(is_mask));
    let Some(lead) = Leading::of(&[q, k, v, &out]).filter(|_| supported) else { return interpret::make(maker) };
    let heads = |o: &Operand| -> Result<Heads> {
        Ok(Heads { ptr: std::ptr::null_mut(), dtype: float_type(maker, o)?, strides: lead.strides(o) })
    };
    let mask =
        rest.first().zip(mask_type).map(|(m, dtype)| Mask { ptr: std::ptr::null(), dtype, strides: lead.strides(m) });
    let shape = Attention {
        batch: lead.sizes[0],
        heads: lead.sizes[1],
        kv_heads: lead.sizes[1],
        seq_q: size(q, 2),
        seq_k: size(k, 2),
        dim: size(q, 1),
        dim_v: size(v, 1),
        scale: *scale as f32,
        causal: *is_causal,
        q: heads(q)?,
        k: heads(k)?,
        v: heads(v)?,
        mask,
        out: heads(&out)?,
    };
    let bytes = scratch_bytes(Pool::global(), maker.isa(), &shape);
    let (q, k, v, mask) = (q.slot, k.slot, v.slot, rest.first().map(|m| m.slot));
    let scratch = (maker.scratch(bytes, "scratch"), bytes);
    Ok(Box::new(AttentionCall { shape, q, k, v, mask, out: out.slot, scratch }))
}

impl Call for AttentionCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let heads = |heads: Heads, slot: Slot| Heads { ptr: ctx.at(slot), ..heads };
        let shape = Attention {
            q: heads(self.shape.q, self.q),
            k: heads(self.shape.k, self.k),
            v: heads(self.shape.v, self.v),
            mask: self.shape.mask.zip(self.mask).map(|(m, slot)| Mask { ptr: ctx.at(slot), ..m }),
            out: heads(self.shape.out, self.out),
            ..self.shape
        };
        let (scratch, bytes) = self.scratch;
        // SAFETY: operands are valid by the caller's promise. The scratch memory was sized for the threads there were at
        // specialization; with more of them the kernel allocates its own.
        unsafe {
            match scratch_bytes(ctx.pool, ctx.isa, &shape) <= bytes {
                true => attention_in(ctx.pool, ctx.isa, &shape, ctx.at(scratch)),
                false => attention(ctx.pool, ctx.isa, &shape),
            }
        }
        .map_err(kernel_error)
    }
}
