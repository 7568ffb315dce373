//! Scaled dot product attention.

use oxidiff_kernels::cpu::attention::{Attention, Heads, MAX_DIM, Mask, attention_in, scratch_bytes};
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

/// A dimension in front of the rows, of all operands together.
struct Leading {
    size: usize,
    /// Of each operand, in elements; 0 where it is broadcast.
    strides: Vec<isize>,
}

impl Leading {
    /// Outermost first; at least two, of which the kernel knows the last two as batch and heads. More than two become fewer
    /// where all operands lie so that a dimension goes on behind the next one: the kernel shares batch and heads among
    /// threads. `None` if an operand has fewer than two dimensions.
    fn of(operands: &[&Operand]) -> Option<Vec<Self>> {
        let rank = operands.iter().map(|o| o.access.shape.len()).max()?.max(4);
        let mut all: Vec<Self> = Vec::with_capacity(rank - 2);
        for at in 0..rank - 2 {
            let mut dim = Self { size: 1, strides: vec![0; operands.len()] };
            for (o, stride) in operands.iter().zip(&mut dim.strides) {
                o.access.shape.len().checked_sub(2)?;
                let own = (at + o.access.shape.len()).checked_sub(rank);
                if let Some(own) = own.filter(|&own| o.access.shape[own] != 1) {
                    (dim.size, *stride) = (o.access.shape[own], o.access.strides[own]);
                }
            }
            match all.last_mut().filter(|_| rank > 4) {
                Some(before) if before.goes_on(&dim) => {
                    dim.size *= before.size;
                    *before = dim;
                }
                _ => all.push(dim),
            }
        }
        while all.len() < 2 {
            all.insert(0, Self { size: 1, strides: vec![0; operands.len()] });
        }
        Some(all)
    }

    /// Whether an index of this dimension is `inner.size` of `inner`.
    fn goes_on(&self, inner: &Self) -> bool {
        let strides = self.strides.iter().zip(&inner.strides);
        self.size == 1 || strides.clone().all(|(&own, &next)| own == next * inner.size as isize)
    }
}

/// Bytes from the first element of operand `which` to that at each index of `outer`, the last of which moves fastest.
fn places(outer: &[Leading], which: usize, o: &Operand) -> Vec<isize> {
    let bytes = o.access.dtype.size_bytes() as isize;
    outer.iter().fold(vec![0], |places, dim| {
        let steps = (0..dim.size as isize).map(|i| i * dim.strides[which] * bytes);
        places.iter().flat_map(|&place| steps.clone().map(move |step| place + step)).collect()
    })
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
    let all: Vec<&Operand> = [q, k, v, &out].into_iter().chain(rest.first()).collect();
    let Some(lead) = Leading::of(&all).filter(|_| supported) else { return interpret::make(maker) };
    let (outer, inner) = lead.split_at(lead.len() - 2);
    let strides = |which: usize| {
        let rows = all[which].access.shape.len() - 2;
        let own = |at: usize| if all[which].access.shape[at] == 1 { 0 } else { all[which].access.strides[at] };
        [inner[0].strides[which], inner[1].strides[which], own(rows), own(rows + 1)]
    };
    let heads = |which: usize| -> Result<Heads> {
        Ok(Heads { ptr: std::ptr::null_mut(), dtype: float_type(maker, all[which])?, strides: strides(which) })
    };
    let mask = mask_type.map(|dtype| Mask { ptr: std::ptr::null(), dtype, strides: strides(4) });
    let shape = Attention {
        batch: inner[0].size,
        heads: inner[1].size,
        kv_heads: inner[1].size,
        seq_q: size(q, 2),
        seq_k: size(k, 2),
        dim: size(q, 1),
        dim_v: size(v, 1),
        scale: *scale as f32,
        causal: *is_causal,
        q: heads(0)?,
        k: heads(1)?,
        v: heads(2)?,
        mask,
        out: heads(3)?,
    };
    let bytes = scratch_bytes(Pool::global(), maker.isa(), &shape);
    let of: Vec<Vec<isize>> = all.iter().enumerate().map(|(which, o)| places(outer, which, o)).collect();
    let places = (0..of[0].len())
        .map(|i| [of[0][i], of[1][i], of[2][i], of.get(4).map_or(0, |masks| masks[i]), of[3][i]])
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
            // SAFETY: operands are valid by the caller's promise, at every index of their dimensions; the scratch memory has
            // these bytes.
            unsafe { attention_in(ctx.pool, ctx.isa, &shape, (ctx.at(scratch), bytes)) }.map_err(kernel_error)
        })
    }
}
