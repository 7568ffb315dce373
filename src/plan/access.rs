//! Where the elements of a value lie: a buffer, an offset and one stride per dimension, all symbolic.
//!
//! Views never move data: they map one [`Access`] to another. A reshape is a view where the new dimensions subdivide or
//! join dimensions that already follow each other in memory; [`Access::reshape`] says so by returning `None` otherwise.

use std::fmt;

use super::BufferId;
use crate::ir::{DType, Dim, Op, ValueType};
use crate::{Error, Result};

/// A strided window onto a buffer; offset and strides in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// The memory.
    pub buffer: BufferId,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<Dim>,
    /// Elements from one index to the next, per dimension; 0 where it is broadcast.
    pub strides: Vec<Dim>,
    /// Element at index 0 of every dimension.
    pub offset: Dim,
}

/// Row-major strides of `shape`.
pub fn dense_strides(shape: &[Dim]) -> Vec<Dim> {
    let mut strides = vec![Dim::constant(1); shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = &strides[i + 1] * &shape[i + 1];
    }
    strides
}

impl Access {
    /// A whole buffer in row-major order.
    pub fn dense(buffer: BufferId, ty: &ValueType) -> Self {
        Self {
            buffer,
            dtype: ty.dtype,
            shape: ty.shape.clone(),
            strides: dense_strides(&ty.shape),
            offset: Dim::default(),
        }
    }

    /// The same elements at the same addresses: strides of dimensions of size 1 do not matter.
    pub fn is_same_place(&self, other: &Self) -> bool {
        let strides = self.strides.iter().zip(&other.strides).zip(&self.shape);
        (self.buffer, self.dtype, &self.shape, &self.offset) == (other.buffer, other.dtype, &other.shape, &other.offset)
            && strides.into_iter().all(|((a, b), size)| size.is(1) || a == b)
    }

    /// Row-major from `offset` on, whatever lies before or behind. Dimensions of size 1 may have any stride.
    pub fn is_dense(&self) -> bool {
        let mut expect = Dim::constant(1);
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if size.is(1) {
                continue;
            }
            if *stride != expect {
                return false;
            }
            expect = &expect * size;
        }
        true
    }

    /// Equal to [`Access::dense`] of a value of that type.
    pub fn is_whole(&self, ty: &ValueType) -> bool {
        let mut expect = Dim::constant(1);
        let is_row_major = |(size, stride): (&Dim, &Dim)| {
            let fits = *stride == expect;
            expect = &expect * size;
            fits
        };
        (self.dtype, &self.shape) == (ty.dtype, &ty.shape)
            && self.offset.is(0)
            && self.shape.iter().zip(&self.strides).rev().all(is_row_major)
    }

    /// Neighbouring elements of the last dimension are neighbours in memory.
    pub fn has_unit_columns(&self) -> bool {
        match (self.shape.last(), self.strides.last()) {
            (Some(size), Some(stride)) => size.is(1) || stride.is(1),
            _ => true,
        }
    }

    /// Dimensions `first..last` can be walked with one stride: the rows of a matrix.
    pub fn is_collapsible(&self, first: usize, last: usize) -> bool {
        self.collapse(first, last).is_some()
    }

    /// Size and stride of the dimensions `first..last` taken as one.
    pub fn collapse(&self, first: usize, last: usize) -> Option<(Dim, Dim)> {
        let mut joined: Option<(Dim, Dim)> = None;
        for i in (first..last).rev().filter(|&i| !self.shape[i].is(1)) {
            joined = Some(match joined {
                None => (self.shape[i].clone(), self.strides[i].clone()),
                Some((size, stride)) if &size * &stride == self.strides[i] => (&size * &self.shape[i], stride),
                Some(_) => return None,
            });
        }
        Some(joined.unwrap_or((Dim::constant(1), Dim::constant(1))))
    }

    /// The view that a movement op makes of it; `None` where the elements would have to move.
    ///
    /// # Errors
    /// If `op` is not a view op.
    pub fn view(&self, op: &Op, shape: &[Dim]) -> Result<Option<Self>> {
        Ok(match op {
            Op::Permute { dims } => Some(self.permute(dims)),
            Op::Slice { dim, start, step } => Some(self.slice(*dim, start, *step, &shape[*dim])),
            Op::Expand => Some(self.expand(shape)),
            Op::Reshape => self.reshape(shape),
            _ => return Err(Error::invalid(format!("`{}` is not a view", op.name()))),
        })
    }

    /// Where the operand of a movement op must lie for its view to be `self`; `None` where there is no such place.
    pub fn invert(&self, op: &Op, operand: &[Dim]) -> Option<Self> {
        match op {
            Op::Permute { dims } => {
                let mut inverse = vec![0; dims.len()];
                dims.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
                Some(self.permute(&inverse))
            }
            Op::Reshape => self.reshape(operand),
            _ => None,
        }
    }

    /// Dimension `i` of the result is dimension `dims[i]`.
    pub fn permute(&self, dims: &[usize]) -> Self {
        let mut view = self.clone();
        view.shape = dims.iter().map(|&d| self.shape[d].clone()).collect();
        view.strides = dims.iter().map(|&d| self.strides[d].clone()).collect();
        view
    }

    /// `[start : start + len * step : step]` along `dim`.
    pub fn slice(&self, dim: usize, start: &Dim, step: i64, len: &Dim) -> Self {
        let mut view = self.clone();
        view.offset = &self.offset + &(start * &self.strides[dim]);
        view.strides[dim] = &self.strides[dim] * &Dim::constant(step);
        view.shape[dim] = len.clone();
        view
    }

    /// Broadcast to `shape`, trailing dimensions aligned.
    pub fn expand(&self, shape: &[Dim]) -> Self {
        let lead = shape.len() - self.shape.len();
        let strides = (0..shape.len()).map(|i| match i.checked_sub(lead) {
            Some(own) if self.shape[own] == shape[i] => self.strides[own].clone(),
            _ => Dim::default(),
        });
        Self { strides: strides.collect(), shape: shape.to_vec(), ..self.clone() }
    }

    /// The same elements in row-major order under another shape, if no element has to move.
    pub fn reshape(&self, shape: &[Dim]) -> Option<Self> {
        let one = Dim::constant(1);
        let mut chunks: Vec<(Dim, Dim)> = Vec::new();
        for (size, stride) in self.shape.iter().zip(&self.strides).filter(|(size, _)| !size.is(1)) {
            match chunks.last_mut() {
                Some((joined, last)) if *last == size * stride => *last = joined_stride(joined, size, stride),
                _ => chunks.push((size.clone(), stride.clone())),
            }
        }
        let mut strides = vec![one.clone(); shape.len()];
        let mut at = shape.len();
        for (size, stride) in chunks.iter().rev() {
            let mut covered = one.clone();
            while covered != *size {
                at = at.checked_sub(1)?;
                strides[at] = &covered * stride;
                covered = &covered * &shape[at];
            }
        }
        if !shape[..at].iter().all(|d| d.is(1)) {
            return None;
        }
        Some(Self { shape: shape.to_vec(), strides, ..self.clone() })
    }

    /// Under `bindings`.
    ///
    /// # Errors
    /// As [`Dim::eval`].
    pub fn concrete(&self, bindings: &[i64]) -> Result<ConcreteAccess> {
        let (mut shape, mut strides) = (Numbers::of(self.shape.len()), Numbers::of(self.strides.len()));
        for (to, dim) in shape.iter_mut().zip(&self.shape) {
            let size = dim.eval(bindings)?;
            *to = usize::try_from(size).map_err(|_| Error::invalid(format!("a size is negative: {size}")))?;
        }
        for (to, dim) in strides.iter_mut().zip(&self.strides) {
            *to = dim.eval(bindings)? as isize;
        }
        let bytes = shape.iter().try_fold(self.dtype.size_bytes(), |n, &d| n.checked_mul(d.max(1)));
        if bytes.is_none_or(|b| isize::try_from(b).is_err()) {
            return Err(Error::OutOfMemory { asked_bytes: usize::MAX, what: "one value".to_owned() });
        }
        let offset = self.offset.eval(bindings)? as isize;
        Ok(ConcreteAccess { buffer: self.buffer, dtype: self.dtype, shape, strides, offset })
    }
}

/// Grows the chunk `joined` by a dimension that follows it directly in memory; gives the chunk's new inner stride.
fn joined_stride(joined: &mut Dim, size: &Dim, stride: &Dim) -> Dim {
    *joined = &*joined * size;
    stride.clone()
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |dims: &[Dim]| dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(",");
        write!(f, "{}:{}[{}]", self.buffer, self.dtype, list(&self.shape))?;
        if !self.is_dense() {
            write!(f, "/({})", list(&self.strides))?;
        }
        if !self.offset.is(0) {
            write!(f, "+{}", self.offset)?;
        }
        Ok(())
    }
}

/// Dimensions of a value that take no memory of their own; more are rare.
const INLINE: usize = 6;

/// One number per dimension.
#[derive(Clone, Debug)]
pub enum Numbers<T> {
    /// So many of them.
    Few(u8, [T; INLINE]),
    /// More than fit.
    Many(Vec<T>),
}

impl<T: Copy + Default> Numbers<T> {
    /// So many zeros.
    fn of(count: usize) -> Self {
        match u8::try_from(count) {
            Ok(few) if count <= INLINE => Self::Few(few, [T::default(); INLINE]),
            _ => Self::Many(vec![T::default(); count]),
        }
    }
}

impl<T> std::ops::Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Few(count, values) => &values[..usize::from(*count)],
            Self::Many(values) => values,
        }
    }
}

impl<T> std::ops::DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Few(count, values) => &mut values[..usize::from(*count)],
            Self::Many(values) => values,
        }
    }
}

impl<'a, T> IntoIterator for &'a Numbers<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: PartialEq> PartialEq for Numbers<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Numbers<T> {}

impl<T: std::hash::Hash> std::hash::Hash for Numbers<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

/// An [`Access`] with numbers in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConcreteAccess {
    /// The memory.
    pub buffer: BufferId,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Numbers<usize>,
    /// In elements.
    pub strides: Numbers<isize>,
    /// In elements.
    pub offset: isize,
}

impl ConcreteAccess {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of its elements, each counted once per index (a broadcast element counts as often as it is read).
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Row-major without gaps.
    pub fn is_dense(&self) -> bool {
        let mut expect = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expect {
                return false;
            }
            expect *= size as isize;
        }
        true
    }

    /// Size and stride of the dimensions `first..last` taken as one, if they can be.
    pub fn collapse(&self, first: usize, last: usize) -> Option<(usize, isize)> {
        let mut joined: Option<(usize, isize)> = None;
        for i in (first..last).rev().filter(|&i| self.shape[i] != 1) {
            joined = Some(match joined {
                None => (self.shape[i], self.strides[i]),
                Some((size, stride)) if size as isize * stride == self.strides[i] => (size * self.shape[i], stride),
                Some(_) => return None,
            });
        }
        Some(joined.unwrap_or((1, 1)))
    }

    /// Strides of the value broadcast to a space of `rank` dimensions and sizes `space`.
    pub fn strides_in(&self, space: &[usize]) -> Vec<isize> {
        let lead = space.len().saturating_sub(self.shape.len());
        (0..space.len())
            .map(|i| match i.checked_sub(lead) {
                Some(own) if self.shape[own] == space[i] => self.strides[own],
                _ => 0,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(text: &str) -> Vec<Dim> {
        text.split(',').filter(|t| !t.is_empty()).map(|t| t.parse().unwrap()).collect()
    }

    fn dense(shape: &str) -> Access {
        Access::dense(BufferId(0), &ValueType::new(DType::F32, dims(shape)))
    }

    fn check_reshape(from: &Access, to: &str, strides: Option<&str>) {
        assert_eq!(from.reshape(&dims(to)).map(|a| a.strides), strides.map(dims), "{from} -> {to}");
    }

    #[test]
    fn reshapes_where_elements_stay() {
        check_reshape(&dense("s0,s1*s2,8"), "s0,s1,s2,4,2", Some("8*s1*s2,8*s2,8,2,1"));
        check_reshape(&dense("s0,s1,s2,8"), "s0*s1*s2,8", Some("8,1"));
        check_reshape(&dense("s0,6"), "1,s0,1,2,3", Some("1,6,3,3,1").map(|_| "1,6,6,3,1"));
        let heads = dense("s0,s1,4,8").permute(&[0, 2, 1, 3]);
        check_reshape(&heads, "s0*4,s1,8", None);
        check_reshape(&heads, "s0,4,s1,2,4", Some("32*s1,8,32,4,1"));
        check_reshape(&dense(""), "1,1", Some("1,1"));
    }

    #[test]
    fn only_the_whole_value_is_whole() {
        let ty = ValueType::new(DType::F32, dims("s0,1,8"));
        let whole = Access::dense(BufferId(3), &ty);
        assert!(whole.is_whole(&ty));
        assert!(!whole.is_whole(&ValueType::new(DType::F16, ty.shape.clone())));
        assert!(!whole.slice(2, &Dim::constant(1), 1, &Dim::constant(7)).is_whole(&ty));
        assert!(!whole.permute(&[1, 0, 2]).is_whole(&ty), "another order of dimensions");
        assert!(!whole.permute(&[1, 0, 2]).is_whole(&ValueType::new(DType::F32, dims("1,s0,8"))), "other strides");
    }

    #[test]
    fn numbers_lie_inline_or_not() {
        for rank in [0, 2, 6, 7, 300] {
            let mut numbers = Numbers::of(rank);
            numbers.iter_mut().enumerate().for_each(|(i, n)| *n = i);
            assert_eq!(numbers.len(), rank);
            assert!(numbers.iter().enumerate().all(|(i, &n)| i == n));
            assert_eq!(numbers, numbers.clone());
            assert_ne!(numbers, Numbers::of(rank + 1));
        }
    }

    #[test]
    fn permutes_invert() {
        let nhwc = dense("s0,s1,s2,4");
        let nchw = Op::Permute { dims: vec![0, 3, 1, 2] };
        let view = nhwc.view(&nchw, &dims("s0,4,s1,s2")).unwrap().unwrap();
        assert!(!view.is_dense() && !view.has_unit_columns());
        assert_eq!(view.invert(&nchw, &nhwc.shape).unwrap(), nhwc);
    }

    #[test]
    fn slices_and_expands() {
        let slice = dense("s0,8").slice(1, &Dim::constant(2), 2, &Dim::constant(3));
        assert_eq!((slice.offset, slice.strides), (Dim::constant(2), dims("8,2")));
        let wide = dense("4,1").expand(&dims("s0,4,s1"));
        assert_eq!(wide.strides, dims("0,1,0"));
    }

    #[test]
    fn rows_collapse_where_they_follow_each_other() {
        assert_eq!(dense("s0,s1,8").collapse(0, 2), Some(("s0*s1".parse().unwrap(), Dim::constant(8))));
        let part = dense("s0,s1,8").slice(1, &Dim::constant(0), 1, &Dim::constant(3));
        assert_eq!(part.collapse(0, 2), None);
        let channels = dense("s0,s1,8").slice(2, &Dim::constant(4), 1, &Dim::constant(4));
        assert!(channels.is_collapsible(0, 2) && channels.has_unit_columns());
    }
}
