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
    /// Where each of q, k, v, the mask and the result is in its slot, in bytes: once for each index of the dimensions in front
    /// of the two that the kernel knows.
    places: Vec<[isize; 5]>,
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

/// Sizes of the leading dimensions of all operands together: batch and heads, and those in front of them, outermost first.
struct Leading {
    sizes: [usize; 2],
    outer: Vec<usize>,
}

impl Leading {
    /// `None` for what has fewer than two dimensions.
    fn of(operands: &[&Operand]) -> Option<Self> {
        let rank = operands.iter().map(|o| o.access.shape.len()).max()?.max(4);
        let mut sizes = vec![1; rank - 2];
        for o in operands {
            let lead = o.access.shape.len().checked_sub(2)?;
            for (size, &d) in sizes[rank - 2 - lead..].iter_mut().zip(&o.access.shape[..lead]) {
                *size = if *size == 1 { d } else { *size };
            }
        }
        let [batch, heads] = [sizes[rank - 4], sizes[rank - 3]];
        sizes.truncate(rank - 4);
        Some(Self { sizes: [batch, heads], outer: sizes })
    }

    /// Bytes from the first element of an operand to that at each index of the outer dimensions, the last of which moves
    /// fastest; dimensions of size 1 are broadcast.
    fn places(&self, o: &Operand) -> Vec<isize> {
        let (mut places, rank, bytes) = (vec![0], o.access.shape.len(), o.access.dtype.size_bytes() as isize);
        for (at, &size) in self.outer.iter().enumerate() {
            let own = (at + rank).checked_sub(self.outer.len() + 4).filter(|&own| o.access.shape[own] != 1);
            let stride = own.map_or(0, |own| o.access.strides[own] * bytes);
            places = places.iter().flat_map(|&place| (0..size as isize).map(move |i| place + i * stride)).collect();
        }
        places
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
    let masks = rest.first().map(|m| lead.places(m));
    let [of_q, of_k, of_v, of_out] = [q, k, v, &out].map(|o| lead.places(o));
    let places = (0..of_q.len())
        .map(|i| [of_q[i], of_k[i], of_v[i], masks.as_ref().map_or(0, |places| places[i]), of_out[i]])
        .collect();
    let (q, k, v, mask) = (q.slot, k.slot, v.slot, rest.first().map(|m| m.slot));
    let scratch = (maker.scratch(bytes, "scratch"), bytes);
    Ok(Box::new(AttentionCall { places, shape, q, k, v, mask, out: out.slot, scratch }))
}

impl Call for AttentionCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let at = |slot: Slot, place: isize| ctx.at(slot).wrapping_offset(place);
        let (scratch, bytes) = self.scratch;
        self.places.iter().try_for_each(|&[q, k, v, mask, out]| {
            let heads = |heads: Heads, slot: Slot, place: isize| Heads { ptr: at(slot, place), ..heads };
            let shape = Attention {
                q: heads(self.shape.q, self.q, q),
                k: heads(self.shape.k, self.k, k),
                v: heads(self.shape.v, self.v, v),
                mask: self.shape.mask.zip(self.mask).map(|(m, slot)| Mask { ptr: at(slot, mask), ..m }),
                out: heads(self.shape.out, self.out, out),
                ..self.shape
            };
            // SAFETY: operands are valid by the caller's promise, at every index of their dimensions. The scratch memory was
            // sized for the threads there were at specialization; with more of them the kernel allocates its own.
            unsafe {
                match scratch_bytes(ctx.pool, ctx.isa, &shape) <= bytes {
                    true => attention_in(ctx.pool, ctx.isa, &shape, ctx.at(scratch)),
                    false => attention(ctx.pool, ctx.isa, &shape),
                }
            }
            .map_err(kernel_error)
        })
    }
}
