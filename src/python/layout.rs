//! Where CPython and torch keep three things: a dictionary's version tag, a tensor's storage, a tensor's version counter.
//!
//! Asking for them through Python costs about 0.1 us each, and a call of a UNet has to ask for thousands. They are plain
//! words at fixed offsets, but the offsets are nobody's promise. So they are *found and proved* once per process: each
//! is searched by comparing words with what the public interface says, over several objects and again after changing
//! them; the search itself reads through `/proc/self/mem`, where a wrong guess is an error and not a crash. What cannot
//! be proved (another platform, another build) is `None`, and callers ask the slow way.

use std::fs::File;
use std::os::unix::fs::FileExt;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList};

/// Offset of `ma_version_tag` in a dictionary, if this interpreter counts versions (CPython 3.10 to 3.13).
#[derive(Clone, Copy, Debug)]
pub struct DictLayout {
    version: usize,
}

/// Offsets in bytes on the way from a `torch.Tensor` object to its storage, memory and version counter.
#[derive(Clone, Copy, Debug)]
pub struct TensorLayout {
    /// Python object -> `TensorImpl`.
    pub tensor_impl: usize,
    /// `TensorImpl` -> `StorageImpl`.
    pub storage: usize,
    /// `StorageImpl` -> first byte of memory.
    pub data: usize,
    /// `TensorImpl` -> [`Geometry`].
    pub geometry: usize,
    /// `TensorImpl` -> version counter; the pointer is null for inference tensors.
    pub counter: usize,
    /// Version counter -> the `u32` that is counted.
    pub version: usize,
}

const WORD: usize = size_of::<usize>();

/// Dimensions whose sizes and strides lie in the `TensorImpl` itself.
const INLINE: usize = 5;

/// How a tensor lies in its storage: its rank, [`INLINE`] sizes and as many strides (of more dimensions: where these are,
/// and nothing to rely on), its offset.
pub type Geometry = [usize; 2 * INLINE + 2];

impl DictLayout {
    /// The layout, found once; `None` where it could not be proved.
    pub fn get(py: Python<'_>) -> Option<Self> {
        static LAYOUT: PyOnceLock<Option<DictLayout>> = PyOnceLock::new();
        *LAYOUT.get_or_init(py, || {
            // Object header (two words) and the number of entries come first.
            let layout = Self { version: 3 * WORD };
            layout.is_right(py).unwrap_or(false).then_some(layout)
        })
    }

    /// The version tag: another number after every change of the dictionary.
    ///
    /// # Safety
    /// `dict` must be a live dictionary (or an instance of a subclass), and the GIL held.
    pub unsafe fn version(self, dict: *const u8) -> u64 {
        // SAFETY: the caller vouches for `dict`; `get` proved that a dictionary holds its tag there.
        unsafe { dict.add(self.version).cast::<u64>().read() }
    }

    /// Where the version tag of the dictionary at an address is.
    pub fn address(self, dict: usize) -> usize {
        dict.wrapping_add(self.version)
    }

    /// Whether the word there behaves like a version tag.
    fn is_right(self, py: Python<'_>) -> PyResult<bool> {
        let version = py.version_info();
        if size_of::<usize>() != 8 || (version.major, version.minor) > (3, 13) || is_free_threaded(py)? {
            return Ok(false);
        }
        dict_changes(py, false, &|dicts| {
            let dicts: Vec<_> = dicts.iter().map(|dict| dict.clone().unbind()).collect();
            let tags = move |_: Python<'_>| -> Vec<u64> {
                // SAFETY: live dictionaries of at least four words, under the GIL; a wrong offset reads a wrong number.
                dicts.iter().map(|dict| unsafe { self.version(dict.as_ptr().cast()) }).collect()
            };
            let mut seen = tags(py);
            Ok(Box::new(move |py| {
                let before = std::mem::replace(&mut seen, tags(py));
                seen.iter().zip(&before).enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect()
            }))
        })
    }
}

/// Says which dictionaries (indices) were written since it was asked last.
type Changed = Box<dyn FnMut(Python<'_>) -> Vec<usize>>;

/// Whether something sees every way in which modules write their dictionaries, and nothing else.
///
/// `watch` is given three dictionaries to look at; the last is that of an object, which was [detached](detach) from it if
/// `is_detached`.
pub(super) fn dict_changes(
    py: Python<'_>,
    is_detached: bool,
    watch: &dyn Fn(&[Bound<'_, PyDict>]) -> PyResult<Changed>,
) -> PyResult<bool> {
    let names = PyDict::new(py);
    py.run(
        c"
import collections
class Plain: pass
def store(target, value): target.x = value
def delete(target): del target.x
ordered = collections.OrderedDict(a=1, c=1)
plain = {'a': 1}
instance = Plain()
store(instance, 0)
attributes = instance.__dict__
def clear(): ordered.clear(); plain.clear(); delete(instance)
changes = [
    lambda: (ordered.__setitem__('b', 1), plain.__setitem__('b', 1), store(instance, 1)),
    lambda: (ordered.__setitem__('b', 2), plain.__setitem__('b', 2), store(instance, 2)),
    lambda: (ordered.pop('b'), plain.pop('b'), setattr(instance, 'y', 1)),
    lambda: (ordered.update(a=3), plain.update(a=3), attributes.update(x=7)),
    lambda: (ordered.__delitem__('a'), plain.setdefault('z', 1), delattr(instance, 'y')),
    clear,
    lambda: (ordered.setdefault('q', 1), plain.setdefault('q', 1), store(instance, 1)),
] + [lambda i=i: (ordered.__setitem__('q', i), plain.__setitem__('q', i), store(instance, i)) for i in range(99, 163)]
",
        Some(&names),
        Some(&names),
    )?;
    let dicts = ["ordered", "plain", "attributes"]
        .into_iter()
        .map(|name| Ok(names.as_any().get_item(name)?.cast_into::<PyDict>()?))
        .collect::<PyResult<Vec<_>>>()?;
    if is_detached {
        detach(&names.as_any().get_item("instance")?, &dicts[2])?;
    }
    let mut changed = watch(&dicts)?;
    for change in names.as_any().get_item("changes")?.cast::<PyList>()?.iter() {
        if !changed(py).is_empty() {
            return Ok(false);
        }
        change.call0()?;
        if changed(py) != [0, 1, 2] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Moves the attributes of an object, which CPython 3.13 keeps beside its dictionary even if somebody holds that, into
/// the dictionary: there alone are writes noticed in every patch release. Nothing else about the object changes.
pub(super) fn detach(object: &Bound<'_, PyAny>, dict: &Bound<'_, PyDict>) -> PyResult<()> {
    let py = object.py();
    object_setattr(py)?.call1(py, (object, intern!(py, "__dict__"), dict)).map(|_| ())
}

/// `object.__setattr__`.
pub(super) fn object_setattr(py: Python<'_>) -> PyResult<&'static Py<PyAny>> {
    static SET: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    SET.get_or_try_init(py, || Ok(py.import("builtins")?.getattr("object")?.getattr("__setattr__")?.unbind()))
}

/// Asks for the memory at an address, which need not be one, past the caches that the call itself needs.
pub(super) fn prefetch(at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program sees and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(std::ptr::without_provenance(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

pub(super) fn is_free_threaded(py: Python<'_>) -> PyResult<bool> {
    let flag = py.import("sysconfig")?.call_method1("get_config_var", ("Py_GIL_DISABLED",))?;
    flag.is_truthy()
}

/// One tensor of the proof, with what the public interface says of it.
struct Sample<'py> {
    tensor: Bound<'py, PyAny>,
    tensor_impl: usize,
    storage: usize,
    data: usize,
    version: u32,
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
}

impl Sample<'_> {
    /// Whether a geometry is this tensor's; `word` gives the word at a place in it.
    fn lies_as(&self, word: impl Fn(usize) -> Option<usize>) -> bool {
        let has = |first: usize, values: &[usize]| values.iter().enumerate().all(|(i, &v)| word(first + i) == Some(v));
        has(0, &[self.shape.len()])
            && has(1, &self.shape)
            && has(1 + INLINE, &self.strides)
            && has(1 + 2 * INLINE, &[self.offset])
    }
}

impl TensorLayout {
    /// The layout, found once; `None` where it could not be proved.
    pub fn get(py: Python<'_>) -> Option<Self> {
        static LAYOUT: PyOnceLock<Option<TensorLayout>> = PyOnceLock::new();
        *LAYOUT.get_or_init(py, || Self::find(py).unwrap_or(None))
    }

    fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let Ok(memory) = File::open("/proc/self/mem") else { return Ok(None) };
        let word = |address: usize| -> Option<usize> {
            let mut bytes = [0u8; WORD];
            memory.read_exact_at(&mut bytes, address as u64).ok().map(|()| usize::from_ne_bytes(bytes))
        };
        let half = |address: usize| -> Option<u32> {
            let mut bytes = [0u8; 4];
            memory.read_exact_at(&mut bytes, address as u64).ok().map(|()| u32::from_ne_bytes(bytes))
        };
        let samples = samples(py)?;
        // The only offset, among those below `end`, at which every sample agrees.
        let only = |end: usize, step: usize, agrees: &dyn Fn(&Sample<'_>, usize) -> bool| -> Option<usize> {
            let mut found = (0..end).step_by(step).filter(|&o| samples.iter().all(|s| agrees(s, o)));
            let first = found.next();
            if found.next().is_some() { None } else { first }
        };
        let tensor_impl = only(8 * WORD, WORD, &|s, o| word(s.tensor.as_ptr() as usize + o) == Some(s.tensor_impl));
        let storage = only(16 * WORD, WORD, &|s, o| word(s.tensor_impl + o) == Some(s.storage));
        // The address is there twice where the allocator keeps it as its own context; the first is the memory's.
        let data = (0..8 * WORD).step_by(WORD).find(|&o| samples.iter().all(|s| word(s.storage + o) == Some(s.data)));
        let (Some(tensor_impl), Some(storage), Some(data)) = (tensor_impl, storage, data) else { return Ok(None) };
        let mut ways = Vec::new();
        for counter in (0..24 * WORD).step_by(WORD) {
            for version in (0..6 * WORD).step_by(4) {
                let agrees = |s: &Sample<'_>| {
                    word(s.tensor_impl + counter).and_then(|p| half(p.wrapping_add(version))) == Some(s.version)
                };
                if samples.iter().all(agrees) {
                    ways.push((counter, version));
                }
            }
        }
        let [(counter, version)] = ways[..] else { return Ok(None) };
        let geometry = only(24 * WORD, WORD, &|s, o| s.lies_as(|i| word(s.tensor_impl + o + i * WORD)));
        let Some(geometry) = geometry else { return Ok(None) };
        let found = Self { tensor_impl, storage, data, geometry, counter, version };
        Ok(found.is_right(py)?.then_some(found))
    }

    /// Whether the offsets hold for other tensors: a parameter, one made in inference mode, one that is swapped.
    fn is_right(self, py: Python<'_>) -> PyResult<bool> {
        let names = PyDict::new(py);
        py.run(
            c"
import torch
with torch.inference_mode():
    inference = torch.ones(3)
parameter = torch.nn.Parameter(torch.zeros(5))
with torch.no_grad():
    for _ in range(41):
        parameter.add_(1)
other = torch.full((7,), 2.0)
turned = torch.zeros(8, 4)[1:6, 2:].as_strided((3, 5), (1, 4), 6)
before = parameter.untyped_storage()._cdata, parameter.data_ptr(), parameter._version
",
            Some(&names),
            Some(&names),
        )?;
        let names = names.as_any();
        let (inference, parameter) = (names.get_item("inference")?, names.get_item("parameter")?);
        let (storage, data, version): (usize, usize, u32) = names.get_item("before")?.extract()?;
        // SAFETY: both are live tensors and the GIL is held; every pointer on the way was proved to be there.
        let (state, none) = unsafe { (self.read(parameter.as_ptr().cast()), self.read(inference.as_ptr().cast())) };
        if (state.storage, state.data, state.version) != (storage, data, Some(version)) || none.version.is_some() {
            return Ok(false);
        }
        parameter.setattr("data", names.get_item("other")?)?;
        let data: usize = parameter.call_method0("data_ptr")?.extract()?;
        // SAFETY: as above.
        let swapped = unsafe { self.read(parameter.as_ptr().cast()) };
        parameter.setattr("data", names.get_item("turned")?)?;
        // SAFETY: as above.
        let turned = unsafe { self.read(parameter.as_ptr().cast()) };
        let is_turned = turned.geometry[..3] == [2, 3, 5] && turned.geometry[1 + INLINE..][..2] == [1, 4];
        if !is_turned || turned.geometry[1 + 2 * INLINE] != 6 {
            return Ok(false);
        }
        Ok(swapped.data == data && swapped.storage != storage && swapped.version == Some(version))
    }

    /// Address of a tensor's `TensorImpl`.
    ///
    /// # Safety
    /// As [`TensorLayout::read`].
    pub unsafe fn implementation(self, tensor: *const u8) -> usize {
        // SAFETY: the offset was proved by `find`.
        unsafe { tensor.add(self.tensor_impl).cast::<usize>().read() }
    }

    /// The words that [`TensorLayout::read`] reads of a tensor with these parts; nothing is read here.
    pub fn places(self, tensor: usize, tensor_impl: usize, storage: usize, counter: usize) -> [usize; 7] {
        let geometry = tensor_impl.wrapping_add(self.geometry);
        [
            tensor.wrapping_add(self.tensor_impl),
            tensor_impl.wrapping_add(self.storage),
            geometry,
            geometry.wrapping_add(size_of::<Geometry>() - WORD),
            tensor_impl.wrapping_add(self.counter),
            storage.wrapping_add(self.data),
            counter.wrapping_add(self.version),
        ]
    }

    /// What a tensor points to now.
    ///
    /// # Safety
    /// `tensor` must be a live `torch.Tensor` object with a storage, and the GIL held.
    pub unsafe fn read(self, tensor: *const u8) -> TensorState {
        // SAFETY: the offsets were proved by `find`. The object owns its `TensorImpl`, which owns its storage and counter.
        unsafe {
            let tensor_impl = tensor.add(self.tensor_impl).cast::<*const u8>().read();
            let storage = tensor_impl.add(self.storage).cast::<*const u8>().read();
            let counter = tensor_impl.add(self.counter).cast::<*const u8>().read();
            let data = if storage.is_null() { 0 } else { storage.add(self.data).cast::<usize>().read() };
            let version = (!counter.is_null()).then(|| counter.add(self.version).cast::<u32>().read_volatile());
            let geometry = tensor_impl.add(self.geometry).cast::<Geometry>().read();
            TensorState { storage: storage as usize, data, counter: counter as usize, version, geometry }
        }
    }
}

/// What [`TensorLayout::read`] saw.
#[derive(Clone, Copy, Debug)]
pub struct TensorState {
    /// Address of the `StorageImpl`.
    pub storage: usize,
    /// Address of the storage's memory.
    pub data: usize,
    /// Address of the version counter, 0 for inference tensors.
    pub counter: usize,
    /// Writes counted; `None` for inference tensors.
    pub version: Option<u32>,
    /// How the tensor lies in the storage.
    pub geometry: Geometry,
}

impl PartialEq for TensorState {
    fn eq(&self, other: &Self) -> bool {
        // All words without a branch: they are equal almost always.
        let pairs = self.geometry.iter().zip(&other.geometry);
        let moved = pairs.fold(0, |sum, (a, b)| sum | (a ^ b));
        let others = (self.storage ^ other.storage) | (self.data ^ other.data) | (self.counter ^ other.counter);
        (moved | others) == 0 && self.version == other.version
    }
}

fn samples(py: Python<'_>) -> PyResult<Vec<Sample<'_>>> {
    let names = PyDict::new(py);
    py.run(
        c"
import torch
found = []
for i, count in enumerate((3, 1000, 77, 12345, 600)):
    whole = torch.zeros(640 + 64 * i, dtype=(torch.float32, torch.bfloat16, torch.int64)[i % 3])
    offset = (0, 3, 0, 7, 0)[i]
    shape = ((40,), (3, 5), (2, 3, 7), (6, 2, 3, 4), (2, 2, 3, 2, 5))[i]
    t = whole.as_strided(shape, torch.empty(shape[::-1]).permute(*range(i, -1, -1)).stride(), offset)
    for _ in range(count % 611):
        t.zero_()
    storage = t.untyped_storage()
    found.append((t, (t._cdata, storage._cdata, storage.data_ptr(), t._version), tuple(t.shape), t.stride(), offset))
",
        Some(&names),
        Some(&names),
    )?;
    let rows = names.as_any().get_item("found")?;
    rows.try_iter()?
        .map(|row| {
            let (tensor, (tensor_impl, storage, data, version), shape, strides, offset) = row?.extract()?;
            Ok(Sample { tensor, tensor_impl, storage, data, version, shape, strides, offset })
        })
        .collect()
}
