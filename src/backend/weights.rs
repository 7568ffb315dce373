//! The tensors bound to a program's weight slots.
//!
//! The user's tensors are the truth; forms derived from them ([`derived`]) are a cache. Each tensor is a [`Source`], known
//! process-wide by its memory, its version counter and the counter's value: sets of whichever program that hold the same
//! tensor with the same content hold the same source, and with it the same derived forms. A run keeps the `Arc` of the set
//! it started with, so swapping the set never disturbs it; a source goes with the last set that holds it.
//!
//! Invariant: a form belongs to one content. Where the caller says that a content changed although its counter did not
//! (`suspects`), only sources made after the change was seen are shared. Tensors whose writes nobody counts (made under
//! `torch.inference_mode`) are read and compared before every run.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use oxidiff_kernels::fork::Mutex;
use oxidiff_kernels::pool::Pool;

use super::derived::{self, Form, FormKey, Store, stamp};
use super::tensor::{Block, Tensor};
use crate::ir::{Dim, Graph};
use crate::plan::{Access, BufferKind, PackForm, Plan};
use crate::target::DeviceKind;
use crate::{Error, Result};

/// How changes of a tensor's content show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Identity {
    /// By a counter: its address, which nothing else has while the tensor's owner lives, and its value.
    Counted {
        /// Address.
        counter: usize,
        /// Value.
        version: u32,
    },
    /// Whoever binds the tensor says so.
    Told,
    /// By nothing but the content.
    Unknown,
}

/// A tensor to bind.
pub struct Weight {
    /// Where it lies.
    pub tensor: Tensor,
    /// How changes of its content show.
    pub identity: Identity,
    /// Keeps the memory (and the counter) alive.
    pub owner: Box<dyn Any + Send + Sync>,
}

impl Weight {
    /// A tensor whose memory outlives every use, by the caller's promise.
    pub fn borrowed(tensor: Tensor) -> Self {
        Self { tensor, identity: Identity::Unknown, owner: Box::new(()) }
    }
}

/// A tensor with one content.
#[derive(PartialEq, Eq)]
struct Content {
    identity: Identity,
    tensor: Tensor,
    /// First, middle and last eight bytes: what is written past the counter mostly shows here.
    samples: [u64; 3],
}

impl Hash for Content {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Enough to tell almost all apart, a tenth of what there is.
        self.identity.hash(state);
        self.tensor.ptr.hash(state);
    }
}

/// A bound tensor, and the forms derived from it alone.
struct Source {
    tensor: Tensor,
    is_dense: bool,
    content: Option<Arc<Content>>,
    born: u64,
    forms: Arc<Store>,
    _owner: Box<dyn Any + Send + Sync>,
}

type Sources = HashMap<Arc<Content>, (u64, Weak<Source>)>;

fn sources() -> &'static Mutex<Sources> {
    static SOURCES: OnceLock<Mutex<Sources>> = OnceLock::new();
    SOURCES.get_or_init(Mutex::default)
}

impl Source {
    fn new(weight: Weight, content: Option<Arc<Content>>) -> Arc<Self> {
        Arc::new(Self {
            is_dense: weight.tensor.is_dense(),
            tensor: weight.tensor,
            content,
            born: stamp(),
            forms: Store::new(),
            _owner: weight.owner,
        })
    }

    /// The source of this content, known or new; one born before `since` is not known. Only memory of this process is
    /// readable.
    fn of(weight: Weight, since: u64, is_readable: bool) -> Arc<Self> {
        if !matches!(weight.identity, Identity::Counted { .. }) {
            return Self::new(weight, None);
        }
        let samples = if is_readable { samples(&weight.tensor) } else { Default::default() };
        let content = Arc::new(Content { identity: weight.identity, tensor: weight.tensor.clone(), samples });
        let mut sources = sources().lock();
        let (known, replaced) = match sources.entry(content.clone()) {
            Entry::Occupied(mut entry) => match entry.get().1.upgrade() {
                Some(known) if known.born >= since => (known, None),
                known => {
                    let source = Self::new(weight, Some(content));
                    entry.insert((source.born, Arc::downgrade(&source)));
                    (source, known)
                }
            },
            Entry::Vacant(entry) => {
                let source = Self::new(weight, Some(content));
                entry.insert((source.born, Arc::downgrade(&source)));
                (source, None)
            }
        };
        // Dropped only after the lock: it may be the last reference.
        drop(sources);
        drop(replaced);
        known
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let Some(content) = &self.content else { return };
        let mut sources = sources().lock();
        if sources.get(content).is_some_and(|(born, _)| *born == self.born) {
            sources.remove(content);
        }
    }
}

/// Memory from a tensor's first to the end of its last element.
fn memory(tensor: &Tensor) -> &[u8] {
    if tensor.ptr.is_null() || tensor.shape.contains(&0) {
        return &[];
    }
    let last: i64 = tensor.shape.iter().zip(&tensor.strides).map(|(size, stride)| (size - 1) * stride).sum();
    let bytes = usize::try_from(last + 1).unwrap_or(0) * tensor.dtype.size_bytes();
    // SAFETY: a bound tensor is readable for its shape and strides by the promise of whoever bound it; strides are not
    // negative. Another thread may write meanwhile, as it may while kernels read.
    unsafe { std::slice::from_raw_parts(tensor.ptr, bytes) }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|w| w.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn samples(tensor: &Tensor) -> [u64; 3] {
    let bytes = memory(tensor);
    let last = bytes.len().saturating_sub(8);
    [0, last / 2, last].map(|at| word(bytes, at))
}

/// A number that another content is as good as certain to change.
fn checksum(bytes: &[u8]) -> u64 {
    const LANES: usize = 8;
    let mut sums = [[0u32; LANES]; 2];
    let mut chunks = bytes.chunks_exact(LANES * 4);
    for chunk in &mut chunks {
        for (lane, word) in chunk.chunks_exact(4).enumerate() {
            sums[0][lane] = sums[0][lane].wrapping_add(u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            sums[1][lane] = sums[1][lane].wrapping_add(sums[0][lane]);
        }
    }
    let rest =
        chunks.remainder().iter().fold(bytes.len() as u64, |h, &b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
    sums.iter().flatten().fold(rest, |h, &w| (h ^ u64::from(w)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}

/// Forms of values that depend on several weights, or on none: by graph and sources.
type Shared = HashMap<(usize, Vec<u64>), Weak<Store>>;

/// The store of a graph's prepared values made from these sources. The graph's address is its name: whoever holds the
/// store holds the graph.
fn shared_store(graph: &Arc<Graph>, sources: Vec<u64>) -> Arc<Store> {
    static SHARED: OnceLock<Mutex<Shared>> = OnceLock::new();
    let mut shared = SHARED.get_or_init(Mutex::default).lock();
    shared.retain(|_, store| store.strong_count() > 0);
    let name = (Arc::as_ptr(graph).addr(), sources);
    if let Some(store) = shared.get(&name).and_then(Weak::upgrade) {
        return store;
    }
    let store = Store::new();
    shared.insert(name, Arc::downgrade(&store));
    store
}

/// Where the panels of a packed weight are kept, and their name there.
struct PackPlace {
    slot: Option<usize>,
    key: FormKey,
    /// The name of the sums of its taps.
    sums: FormKey,
}

const PACK: i64 = 1;
const DENSE: i64 = 2;
const PREPARED: i64 = 3;
const SUMS: i64 = 4;

fn pack_places(plan: &Plan) -> Result<Vec<PackPlace>> {
    let numbers = |dims: &[Dim]| dims.iter().map(|d| d.eval(&[])).collect::<Result<Vec<i64>>>();
    let place = |(source, form): (&Access, &PackForm)| {
        let groups = match form {
            PackForm::Matrix => 0,
            PackForm::Convolution { groups } => *groups as i64,
        };
        let slot = match plan.buffers[source.buffer.index()].kind {
            BufferKind::Parameter(slot) => Some(slot as usize),
            _ => None,
        };
        // Forms of a parameter are shared by every plan; others belong to this plan's buffers.
        let buffer = if slot.is_some() { 0 } else { source.buffer.0 as i64 };
        let mut name = vec![PACK, plan.target.isa as i64, groups, buffer, source.offset.eval(&[])?];
        name.extend(numbers(&source.shape)?);
        name.extend(numbers(&source.strides)?);
        let key = name.as_slice().into();
        name[0] = SUMS;
        Ok(PackPlace { slot, key, sums: name.as_slice().into() })
    };
    plan.packs.iter().map(|pack| place((&pack.source, &pack.form))).collect()
}

/// Bound weights; see the module documentation.
pub struct WeightSet {
    sources: Vec<Arc<Source>>,
    packs: Vec<PackPlace>,
    dense: FormKey,
    prepared: FormKey,
    /// Forms of what is made of several weights.
    shared: Arc<Store>,
    _graph: Arc<Graph>,
    /// Slots of identity [`Identity::Unknown`], and the checksum of their contents.
    unknown: Vec<usize>,
    /// Whether contents can be looked at: not in another device's memory.
    is_readable: bool,
    unknown_sum: Mutex<Option<u64>>,
    /// Bytes of derived forms, and the event after which they were counted.
    counted: Mutex<(usize, usize)>,
}

impl std::fmt::Debug for WeightSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} weights, {} derived bytes", self.sources.len(), self.derived_bytes())
    }
}

/// Most mismatches a message lists.
const LISTED: usize = 5;

/// What a caller knows of the contents it binds.
#[derive(Clone, Copy, Default)]
pub struct Known<'a> {
    /// The set in force.
    pub previous: Option<&'a WeightSet>,
    /// Slots whose content is another one than in `previous`.
    pub changed: &'a [usize],
    /// Those of them where no counter shows it.
    pub suspects: &'a [usize],
    /// A [`stamp`] from before the changes were looked for.
    pub since: u64,
}

impl WeightSet {
    /// Binds one tensor per weight slot of the plan's graph, in slot order.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first slots whose shape or type differ.
    pub fn new(plan: &Plan, weights: Vec<Weight>, known: Known<'_>) -> Result<Self> {
        check(&plan.graph, &weights)?;
        let is_readable = plan.target.kind == DeviceKind::Cpu;
        let bind = |(slot, weight): (usize, Weight)| {
            if weight.identity == Identity::Told
                && !known.changed.contains(&slot)
                && let Some(before) = known.previous.and_then(|p| p.sources.get(slot))
                && before.tensor == weight.tensor
            {
                return before.clone();
            }
            Source::of(weight, if known.suspects.contains(&slot) { known.since } else { 0 }, is_readable)
        };
        let is_unknown = |(slot, weight): (usize, &Weight)| (weight.identity == Identity::Unknown).then_some(slot);
        let unknown = weights.iter().enumerate().filter_map(is_unknown).collect();
        let sources: Vec<Arc<Source>> = weights.into_iter().enumerate().map(bind).collect();
        Self::of(plan, sources, unknown)
    }

    fn of(plan: &Plan, sources: Vec<Arc<Source>>, unknown: Vec<usize>) -> Result<Self> {
        let packs = pack_places(plan)?;
        let is_shared = !plan.prepare.is_empty() || packs.iter().any(|p| p.slot.is_none());
        let shared = match is_shared {
            true => shared_store(&plan.graph, sources.iter().map(|s| s.born).collect()),
            false => Store::new(),
        };
        Ok(Self {
            packs,
            dense: [DENSE].as_slice().into(),
            prepared: [PREPARED].as_slice().into(),
            shared,
            _graph: plan.graph.clone(),
            sources,
            unknown,
            is_readable: plan.target.kind == DeviceKind::Cpu,
            unknown_sum: Mutex::default(),
            counted: Mutex::new((usize::MAX, 0)),
        })
    }

    /// The same tensors, of which those in `slots` are taken to have another content.
    ///
    /// # Errors
    /// None that [`WeightSet::new`] did not have.
    pub fn without(self: &Arc<Self>, plan: &Plan, slots: &[usize]) -> Result<Self> {
        let renew = |(slot, source): (usize, &Arc<Source>)| match slots.contains(&slot) {
            true => {
                // The old source owns the memory.
                let owner = Box::new(source.clone());
                Source::new(Weight { tensor: source.tensor.clone(), identity: Identity::Told, owner }, None)
            }
            false => source.clone(),
        };
        Self::of(plan, self.sources.iter().enumerate().map(renew).collect(), self.unknown.clone())
    }

    /// The tensor of a slot.
    pub fn tensor(&self, slot: usize) -> Option<&Tensor> {
        self.sources.get(slot).map(|s| &s.tensor)
    }

    /// Whether the tensor of a slot is row-major without gaps.
    pub fn is_dense(&self, slot: usize) -> bool {
        self.sources.get(slot).is_some_and(|s| s.is_dense)
    }

    /// Bytes of the user's tensors.
    pub fn weight_bytes(&self) -> usize {
        self.sources.iter().map(|s| s.tensor.bytes()).sum()
    }

    fn stores(&self) -> impl Iterator<Item = &Store> {
        self.sources.iter().map(|s| &*s.forms).chain([&*self.shared])
    }

    /// Bytes of everything derived so far, what is shared with other sets included.
    pub fn derived_bytes(&self) -> usize {
        let now = derived::events();
        let mut counted = self.counted.lock();
        if counted.0 != now {
            *counted = (now, self.stores().map(Store::bytes).sum());
        }
        counted.1
    }

    /// The same by where it is kept, which sets may share: an address that stands for it while it lives, and bytes.
    pub fn derived(&self) -> Vec<(usize, usize)> {
        let stores = self.stores().map(|store| (std::ptr::from_ref(store).addr(), store.bytes()));
        stores.filter(|&(_, bytes)| bytes > 0).collect()
    }

    /// Evicts derived forms, least recently used first, until at most `bytes` are kept; gives the bytes evicted. They are
    /// made again when they are needed.
    pub fn shrink_to(&self, bytes: usize) -> usize {
        let held = self.derived_bytes();
        if held <= bytes { 0 } else { derived::evict(self.stores(), held - bytes) }
    }

    /// Lets go of the forms of weights whose changes nobody counts, if they changed since the last run; where they cannot be
    /// looked at, in any case.
    pub fn recheck(&self) {
        if self.unknown.is_empty() {
            return;
        }
        if !self.is_readable {
            self.unknown.iter().for_each(|&slot| self.sources[slot].forms.clear());
            self.shared.clear();
            return;
        }
        const CHUNK: usize = 1 << 20;
        let memories = self.unknown.iter().map(|&slot| memory(&self.sources[slot].tensor));
        let chunks: Vec<&[u8]> = memories.flat_map(|m| m.chunks(CHUNK)).collect();
        let sums: Vec<AtomicU64> = chunks.iter().map(|_| AtomicU64::new(0)).collect();
        Pool::global().run(chunks.len(), |task, _| sums[task].store(checksum(chunks[task]), Ordering::Relaxed));
        let sum = sums
            .iter()
            .fold(0u64, |h, s| h.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ s.load(Ordering::Relaxed));
        let before = self.unknown_sum.lock().replace(sum);
        if before.is_some_and(|before| before != sum) {
            self.unknown.iter().for_each(|&slot| self.sources[slot].forms.clear());
            self.shared.clear();
        }
    }

    /// The panels of packed weight `index`, made by `make` if there are none.
    ///
    /// # Errors
    /// What `make` says.
    pub fn pack(&self, index: usize, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        let (place, store) = self.place(index)?;
        store.get_or_make(&place.key, make)
    }

    /// Sums of the taps of packed weight `index`, made by `make` if there are none.
    ///
    /// # Errors
    /// What `make` says.
    pub fn sums(&self, index: usize, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        let (place, store) = self.place(index)?;
        store.get_or_make(&place.sums, make)
    }

    /// Whether the panels of packed weight `index` are there; if so, they count as used now.
    pub fn touch(&self, index: usize) -> bool {
        self.place(index).is_ok_and(|(place, store)| store.touch(&place.key))
    }

    fn place(&self, index: usize) -> Result<(&PackPlace, &Store)> {
        let Some(place) = self.packs.get(index) else {
            return Err(Error::Backend { backend: "weights", what: format!("no packed weight {index}") });
        };
        Ok((place, place.slot.map_or(&*self.shared, |slot| &*self.sources[slot].forms)))
    }

    /// A dense copy of slot `slot`, made by `make` if there is none.
    ///
    /// # Errors
    /// What `make` says.
    pub fn dense(&self, slot: usize, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        match self.sources.get(slot) {
            Some(source) => source.forms.get_or_make(&self.dense, make),
            None => Err(Error::Backend { backend: "weights", what: format!("no weight slot {slot}") }),
        }
    }

    /// The derived buffers, one after the other, made by `make` if there are none.
    ///
    /// # Errors
    /// What `make` says.
    pub fn prepared(&self, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        self.shared.get_or_make(&self.prepared, make)
    }
}

fn check(graph: &Graph, weights: &[Weight]) -> Result<()> {
    if weights.len() != graph.parameters.len() {
        return Err(Error::invalid(format!("{} weights for {} slots", weights.len(), graph.parameters.len())));
    }
    let mut wrong = Vec::new();
    for (slot, Weight { tensor, .. }) in graph.parameters.iter().zip(weights) {
        let shape = slot.ty.concrete(&[])?;
        if tensor.dtype != slot.ty.dtype || tensor.shape != shape {
            wrong.push(format!("{}: expected {}, got {}{:?}", slot.name, slot.ty, tensor.dtype, tensor.shape));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let more = wrong.len().saturating_sub(LISTED);
    wrong.truncate(LISTED);
    let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
    Err(Error::invalid(format!("weights do not fit the program: {}{tail}", wrong.join("; "))))
}
