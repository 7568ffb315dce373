//! `Tree`: what a module computes, read off its tree of submodules in one go.
//!
//! Two modules with the same fingerprint compute the same function of their tensors and arguments. It is a digest of values
//! where values say it all, so that it is the same for another module of the same class and configuration, and of
//! addresses elsewhere (classes, functions, objects with a state that Python does not show); what has an address in it is
//! kept alive. LoRA layers do not show in it.
//!
//! Floats are kept apart, in the order in which they were met: which of them are inputs of a program, and so no part of what
//! it is, is for the caller to say ([`Tree::fingerprint`]).
//!
//! Everything that was read can be watched ([`super::watch`]): each dictionary's version is from before it was read. Nothing
//! of Python's runs while a dictionary is iterated: what might run code is set aside until the end of it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use pyo3::exceptions::{PyIndexError, PyNotImplementedError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString, PyTuple, PyType};
use pyo3::{Borrowed, ffi, intern};

use super::attributes::{Classes, Kind, Role, SKIPPED, role_of};
use super::errors::shielded;
use super::layout::{TensorLayout, prefetch};
use super::lists::{Lists, plain_attribute};
use super::tensor::{Exchange, View};
use super::versions::Dicts;

/// Hashes an address: its bits are as good as random above the alignment.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(usize::from(byte)));
    }

    fn write_usize(&mut self, address: usize) {
        let mixed = (self.0 ^ (address as u64 >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

pub(super) type ByAddress<T> = HashMap<usize, T, BuildHasherDefault<AddressHasher>>;

/// How many modules ahead of the one that is read memory is asked for.
const AHEAD: usize = 16;

/// How deep containers and objects in attributes are looked into.
const DEPTH: u32 = 6;

/// Calls `visit` with every item of a dictionary without counting references: half of the time of a scan.
///
/// # Safety
/// `visit` must run no code that could write the dictionary, which is any code of Python's.
unsafe fn each_item<'py>(
    dict: &Bound<'py, PyDict>,
    mut visit: impl FnMut(&Bound<'py, PyAny>, &Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    let (mut at, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a live dictionary, under the GIL, that nobody writes meanwhile by the promise of the caller.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &mut at, &mut key, &mut value) } != 0 {
        // SAFETY: the dictionary holds both until it is written.
        let (key, value) = unsafe { (Borrowed::from_ptr(dict.py(), key), Borrowed::from_ptr(dict.py(), value)) };
        visit(&key, &value)?;
    }
    Ok(())
}

/// Functions of the package that the scan asks, where Python knows better.
struct Questions<'py> {
    base_of: Bound<'py, PyAny>,
    obstacle: Bound<'py, PyAny>,
    around: Bound<'py, PyAny>,
    is_plain: Bound<'py, PyAny>,
    slots: Bound<'py, PyAny>,
    /// `collections.OrderedDict`.
    ordered: Bound<'py, PyAny>,
    /// The class of the layers that PEFT puts around others, where it is imported.
    adapter: Option<Bound<'py, PyType>>,
}

/// Attributes of a module that are about what is around it, and what stands for them.
type Around<'py> = (Vec<String>, Vec<Bound<'py, PyAny>>);

/// A float in an attribute, or in a container there.
struct Float {
    value: f64,
    /// The number of the module that has the attribute.
    node: usize,
    attribute: Py<PyAny>,
    /// The dictionary or list that holds it, and where.
    place: (Py<PyAny>, Py<PyAny>),
    /// Whether it is the attribute itself.
    is_attribute: bool,
}

/// One module.
struct Node {
    path: String,
    module: Py<PyAny>,
    /// The address of its class, which is kept.
    class: usize,
    /// The LoRA layer around it.
    layer: Option<Py<PyAny>>,
    /// Where the first of its dictionaries is.
    first_dict: usize,
    /// Where the first of the dictionaries is that its attributes hold, behind those of all modules.
    first_inner: usize,
}

/// The dictionaries of one module, in the order in which they are listed.
struct Tables<'py> {
    attributes: Bound<'py, PyDict>,
    parameters: Bound<'py, PyDict>,
    buffers: Bound<'py, PyDict>,
    modules: Bound<'py, PyDict>,
    hooks: Bound<'py, PyDict>,
    pre_hooks: Bound<'py, PyDict>,
}

/// Where `_modules` is among the dictionaries of a module.
const MODULES_AT: usize = 3;

impl<'py> Tables<'py> {
    fn of(module: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = module.py();
        let attributes = module.getattr(intern!(py, "__dict__"))?.cast_into::<PyDict>()?;
        let table = |name: &Bound<'py, PyString>| -> PyResult<Bound<'py, PyDict>> {
            let found = match attributes.get_item(name)? {
                Some(found) => found,
                None => module.getattr(name)?,
            };
            Ok(found.cast_into::<PyDict>()?)
        };
        Ok(Self {
            parameters: table(intern!(py, "_parameters"))?,
            buffers: table(intern!(py, "_buffers"))?,
            modules: table(intern!(py, "_modules"))?,
            hooks: table(intern!(py, "_forward_hooks"))?,
            pre_hooks: table(intern!(py, "_forward_pre_hooks"))?,
            attributes,
        })
    }

    fn others(&self) -> [&Bound<'py, PyDict>; 5] {
        [&self.parameters, &self.buffers, &self.modules, &self.hooks, &self.pre_hooks]
    }

    /// Whether it is a model of diffusers or transformers, which has attributes about adapters.
    fn is_model(&self) -> PyResult<bool> {
        let py = self.attributes.py();
        Ok(self.attributes.contains(intern!(py, "config"))?
            || self.attributes.contains(intern!(py, "_internal_dict"))?)
    }
}

/// Tokens of a fingerprint, or of the key of a call.
#[derive(Default)]
pub(super) struct Tokens(pub(super) Vec<u8>);

impl Tokens {
    pub(super) fn tag(&mut self, tag: u8) {
        self.0.push(tag);
    }

    pub(super) fn word(&mut self, word: u64) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// Dtype, device and sizes of a tensor.
    pub(super) fn view(&mut self, view: &View<'_>) {
        let (dtype, device) = (view.dtype, view.device);
        self.word(u64::from(dtype.code) | u64::from(dtype.bits) << 8 | u64::from(dtype.lanes) << 16);
        self.word(u64::from(device.device_type) << 32 | u64::from(device.device_id.cast_unsigned()));
        self.word(view.shape.len() as u64);
        view.shape.iter().for_each(|size| self.word(size.cast_unsigned()));
    }
}

// What follows a class in a fingerprint.
const VALUE: u8 = 0;
const TEXT: u8 = 1;
const INTS: u8 = 2;
const TENSOR: u8 = 3;
const NODE: u8 = 4;
const IDENTITY: u8 = 5;
const SEEN: u8 = 6;
const ITEMS: u8 = 7;
const PARTS: u8 = 8;
const ABSENT: u8 = 9;
const LONG: u8 = 10;
const NEGATIVE: u8 = 11;
const CONJUGATE: u8 = 12;

/// DLPack's `kDLComplex`.
const DL_COMPLEX: u8 = 5;

struct Scan<'py> {
    py: Python<'py>,
    classes: &'static Classes,
    exchange: Exchange,
    questions: Questions<'py>,
    tokens: Tokens,
    kinds: ByAddress<(Kind, Bound<'py, PyType>)>,
    /// Roles of names by the address of the string, which is kept.
    roles: ByAddress<(Role, Bound<'py, PyAny>)>,
    /// Numbers of the tensors and values that were met.
    seen: ByAddress<u64>,
    /// Numbers of modules; a LoRA layer has that of the layer inside.
    names: ByAddress<u64>,
    nodes: Vec<Node>,
    dicts: Dicts,
    lists: Lists,
    kept: Bound<'py, PyList>,
    tensors: Vec<Py<PyAny>>,
    /// Places of tensors among `tensors`.
    places: ByAddress<()>,
    /// Dtypes, shapes and devices of `tensors`.
    types: Tokens,
    floats: Vec<Float>,
    /// The module and the attribute that are being described.
    within: Option<(usize, Bound<'py, PyAny>)>,
    has_other_adapters: bool,
    obstacle: Option<(String, String)>,
}

impl<'py> Scan<'py> {
    fn walk(&mut self, root: Bound<'py, PyAny>) -> PyResult<Vec<Tables<'py>>> {
        let mut all = Vec::new();
        let mut stack = vec![(String::new(), root)];
        let mut seen = ByAddress::<()>::default();
        while let Some((path, mut module)) = stack.pop() {
            if seen.insert(module.as_ptr().addr(), ()).is_some() {
                continue;
            }
            let mut layer = None;
            if self.is_adapter(&module) {
                let base = self.questions.base_of.call1((&module,))?;
                if base.is_none() {
                    self.has_other_adapters = true;
                } else {
                    seen.insert(base.as_ptr().addr(), ());
                    self.names.insert(module.as_ptr().addr(), self.nodes.len() as u64);
                    layer = Some(std::mem::replace(&mut module, base).unbind());
                }
            }
            self.names.insert(module.as_ptr().addr(), self.nodes.len() as u64);
            let tables = Tables::of(&module)?;
            let first_dict = self.dicts.len();
            self.read_all(&module, &tables)?;
            let prefix = if path.is_empty() { String::new() } else { format!("{path}.") };
            let mut children = Vec::new();
            for (name, child) in tables.modules.iter() {
                if !child.is_none() {
                    children.push((format!("{prefix}{}", name.cast::<PyString>()?.to_str()?), child));
                }
            }
            stack.extend(children.into_iter().rev());
            let class = module.get_type_ptr().addr();
            self.nodes.push(Node { path, module: module.unbind(), class, layer, first_dict, first_inner: 0 });
            all.push(tables);
        }
        Ok(all)
    }

    fn is_adapter(&self, module: &Bound<'py, PyAny>) -> bool {
        let Some(adapter) = &self.questions.adapter else { return false };
        // SAFETY: both are live classes; nothing but their method resolution orders is read.
        unsafe { ffi::PyType_IsSubtype(module.get_type_ptr(), adapter.as_ptr().cast()) != 0 }
    }

    fn read_all(&mut self, module: &Bound<'py, PyAny>, tables: &Tables<'py>) -> PyResult<()> {
        self.dicts.note_attributes(module, &tables.attributes)?;
        tables.others().into_iter().try_for_each(|table| self.dicts.note(table))
    }

    fn entry(&mut self, at: usize, tables: &Tables<'py>) -> PyResult<()> {
        self.nodes[at].first_inner = self.dicts.len();
        let module = self.nodes[at].module.bind(self.py).clone();
        self.kind(&module);
        let has_hooks = self.attributes(at, &module, tables, tables.is_model()?)?;
        let is_hooked = has_hooks || !tables.hooks.is_empty() || !tables.pre_hooks.is_empty();
        if is_hooked && at > 0 && self.obstacle.is_none() {
            let reason: Option<String> = self.questions.obstacle.call1((&module,))?.extract()?;
            self.obstacle = reason.map(|reason| (self.nodes[at].path.clone(), reason));
        }
        Ok(())
    }

    /// Whether there is a hook of accelerate or diffusers.
    fn attributes(
        &mut self,
        at: usize,
        module: &Bound<'py, PyAny>,
        tables: &Tables<'py>,
        is_model: bool,
    ) -> PyResult<bool> {
        let (mut has_hooks, mut later, start) = (false, Vec::new(), self.tokens.0.len());
        let (table, first_float) = (&tables.attributes, self.floats.len());
        let quick = |name: &Bound<'py, PyAny>, value: &Bound<'py, PyAny>| {
            has_hooks |= self.attribute(at, table, name, value, is_model, &mut later, true)?;
            Ok(())
        };
        // SAFETY: what fails may have run code of Python's (an exception is an object, for which garbage may be collected), and
        // ends the iteration; the rest is read by functions of the interpreter that call nothing else.
        if unsafe { each_item(table, quick) }.is_err() {
            self.tokens.0.truncate(start);
            self.floats.truncate(first_float);
            later.clear();
            let mut items: Vec<_> = table.iter().collect();
            if (table.contains(intern!(self.py, "_diffusers_hook"))? || table.contains(intern!(self.py, "_hf_hook"))?)
                && let Some(around) = self.questions.around.call1((module,))?.extract::<Option<Around<'py>>>()?
            {
                has_hooks = true;
                items.retain(|(name, _)| !around.0.iter().any(|hidden| name.eq(hidden.as_str()).unwrap_or(false)));
                for value in around.1 {
                    self.tokens.tag(PARTS);
                    self.token(&value, DEPTH)?;
                }
            }
            for (name, value) in items {
                has_hooks |= self.attribute(at, table, &name, &value, is_model, &mut later, false)?;
            }
        }
        self.tokens.tag(ABSENT);
        for (name, value) in later {
            self.within = Some((at, name));
            self.token(&value, DEPTH)?;
        }
        self.within = None;
        for table in [&tables.parameters, &tables.buffers] {
            // Describing a tensor of a subclass may run code.
            let items: Vec<_> = table.iter().collect();
            self.tokens.word(items.len() as u64);
            for (name, tensor) in items {
                self.name(&name)?;
                if tensor.is_none() {
                    self.tokens.tag(ABSENT);
                } else if self.kind_of(&tensor) == Kind::Tensor {
                    let first = self.tokens.0.len();
                    self.tensor(&tensor);
                    let end = self.tokens.0.len() - size_of::<u64>();
                    if self.own(&tensor) {
                        self.types.0.extend_from_slice(&self.tokens.0[first + 1..end]);
                    }
                } else {
                    let what = format!("{} holds something else than a tensor", module.get_type().name()?);
                    return Err(PyTypeError::new_err(what));
                }
            }
        }
        self.tokens.word(tables.modules.len() as u64);
        for (name, child) in tables.modules.iter() {
            self.name(&name)?;
            let number = self.names.get(&child.as_ptr().addr()).copied();
            self.tokens.word(number.map_or(0, |n| n + 1));
        }
        Ok(has_hooks)
    }

    /// One attribute; whether it is a hook. `later` gets a value that is not described at once.
    ///
    /// With `is_quick`, neither name nor value is touched after something failed, and nothing calls code of Python's.
    #[expect(clippy::too_many_arguments, reason = "one step of the loop above, which borrows all of them")]
    fn attribute(
        &mut self,
        at: usize,
        table: &Bound<'py, PyDict>,
        name: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        is_model: bool,
        later: &mut Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
        is_quick: bool,
    ) -> PyResult<bool> {
        let role = if is_quick { self.role(name)? } else { self.role(name).unwrap_or(Role::Read) };
        if role == Role::Skipped || (role == Role::Adapter && is_model) {
            return Ok(false);
        }
        if role == Role::Hook {
            if is_quick {
                return Err(PyTypeError::new_err("whether there are hooks has to be asked"));
            }
            // Pipelines of diffusers make a registry to reset what hooks keep, also where there are none.
            let hooks = value.getattr(intern!(self.py, "hooks")).and_then(|hooks| hooks.is_truthy());
            if hooks.is_ok_and(|are_any| !are_any) {
                return Ok(true);
            }
        }
        let kind = self.kind_of(value);
        if role == Role::Unread && kind.is_scalar() {
            return Ok(false);
        }
        if is_quick {
            self.text(name)?;
        } else {
            self.name(name)?;
        }
        if kind == Kind::Float {
            self.tokens.tag(VALUE);
            self.kind(value);
            self.floats.push(Float {
                value: value.cast::<PyFloat>()?.value(),
                node: at,
                attribute: name.clone().unbind(),
                place: (table.clone().into_any().unbind(), name.clone().unbind()),
                is_attribute: true,
            });
        } else if is_quick && kind.is_plain() {
            self.tokens.tag(VALUE);
            self.kind(value);
            self.plain(kind, value)?;
        } else if kind.is_plain() {
            self.tokens.tag(VALUE);
            self.kind(value);
            self.scalar(kind, value)?;
        } else {
            self.tokens.tag(PARTS);
            later.push((name.clone(), value.clone()));
        }
        Ok(role == Role::Hook)
    }

    /// Adds a tensor; whether it was new.
    fn own(&mut self, tensor: &Bound<'py, PyAny>) -> bool {
        let is_new = self.places.insert(tensor.as_ptr().addr(), ()).is_none();
        if is_new {
            self.tensors.push(tensor.clone().unbind());
        }
        is_new
    }

    /// What an attribute's name says. Names are almost always the same few hundred objects.
    fn role(&mut self, name: &Bound<'py, PyAny>) -> PyResult<Role> {
        let at = name.as_ptr().addr();
        if let Some((role, _)) = self.roles.get(&at) {
            return Ok(*role);
        }
        let role = role_of(name.cast::<PyString>()?.to_str()?);
        self.roles.insert(at, (role, name.clone()));
        Ok(role)
    }

    /// A key of a dictionary: strings by what they say, others by what they are.
    fn name(&mut self, name: &Bound<'py, PyAny>) -> PyResult<()> {
        if self.text(name).is_ok() {
            return Ok(());
        }
        let kind = self.kind_of(name);
        self.kind(name);
        if kind.is_plain() { self.scalar(kind, name) } else { self.identity(name) }
    }

    fn text(&mut self, text: &Bound<'py, PyAny>) -> PyResult<()> {
        let text = text.cast::<PyString>()?.to_str()?;
        self.tokens.tag(TEXT);
        self.tokens.bytes(text.as_bytes());
        Ok(())
    }

    fn kind_of(&mut self, value: &Bound<'py, PyAny>) -> Kind {
        let class = value.get_type_ptr();
        if let Some((kind, _)) = self.kinds.get(&class.addr()) {
            return *kind;
        }
        let class = value.get_type();
        let kind = self.classes.kind_of(&class);
        self.kinds.insert(class.as_ptr().addr(), (kind, class));
        kind
    }

    /// The class of a value.
    fn kind(&mut self, value: &Bound<'py, PyAny>) {
        self.kind_of(value);
        self.tokens.word(value.get_type_ptr().addr() as u64);
    }

    /// A plain value after its class, unless it needs the way of [`Scan::scalar`].
    fn plain(&mut self, kind: Kind, value: &Bound<'py, PyAny>) -> PyResult<()> {
        match kind {
            Kind::None => {}
            Kind::Bool => self.tokens.tag(u8::from(value.cast::<PyBool>()?.is_true())),
            Kind::Float => self.tokens.word(value.cast::<PyFloat>()?.value().to_bits()),
            // One object for each dtype, which is never freed.
            Kind::DType => self.tokens.word(value.as_ptr().addr() as u64),
            Kind::Bytes => self.tokens.bytes(value.cast::<PyBytes>()?.as_bytes()),
            Kind::Text => self.text(value)?,
            Kind::Int => {
                let number: i64 = value.extract()?;
                self.tokens.tag(VALUE);
                self.tokens.word(number.cast_unsigned());
            }
            _ => return Err(PyTypeError::new_err("not plain")),
        }
        Ok(())
    }

    /// A scalar after its class.
    fn scalar(&mut self, kind: Kind, value: &Bound<'py, PyAny>) -> PyResult<()> {
        if kind.is_plain() && self.plain(kind, value).is_ok() {
            return Ok(());
        }
        self.tokens.tag(LONG);
        self.tokens.bytes(value.repr()?.to_string_lossy().as_bytes());
        Ok(())
    }

    fn identity(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        self.tokens.tag(IDENTITY);
        self.tokens.word(value.as_ptr().addr() as u64);
        self.kept.append(value)
    }

    fn note(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let number = self.seen.len() as u64;
        self.seen.insert(value.as_ptr().addr(), number);
        self.kept.append(value)
    }

    /// A tensor: its type, then which of them are one and the same, which is structure too.
    fn tensor(&mut self, tensor: &Bound<'py, PyAny>) {
        self.tokens.tag(TENSOR);
        type_of(&mut self.tokens, self.exchange, tensor);
        let next = self.seen.len() as u64;
        let number = *self.seen.entry(tensor.as_ptr().addr()).or_insert(next);
        self.tokens.word(number);
    }

    /// A float that `holder` has under `key`; false for anything else.
    fn float(
        &mut self,
        value: &Bound<'py, PyAny>,
        holder: &Bound<'py, PyAny>,
        key: Bound<'py, PyAny>,
    ) -> PyResult<bool> {
        let is_float = self.kind_of(value) == Kind::Float;
        let Some((node, attribute)) = self.within.as_ref().filter(|_| is_float) else { return Ok(false) };
        self.floats.push(Float {
            value: value.cast::<PyFloat>()?.value(),
            node: *node,
            attribute: attribute.clone().unbind(),
            place: (holder.clone().unbind(), key.unbind()),
            is_attribute: false,
        });
        self.kind(value);
        Ok(true)
    }

    fn token(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        let kind = self.kind_of(value);
        self.kind(value);
        if kind.is_scalar() {
            return self.scalar(kind, value);
        }
        match kind {
            Kind::Tensor => {
                self.kept.append(value)?;
                self.tensor(value);
                return Ok(());
            }
            Kind::Module => {
                match self.names.get(&value.as_ptr().addr()) {
                    Some(&number) => {
                        self.tokens.tag(NODE);
                        self.tokens.word(number);
                    }
                    None => self.identity(value)?,
                }
                return Ok(());
            }
            Kind::Class => return self.identity(value),
            Kind::Enum => {
                self.tokens.tag(TEXT);
                let name = value.getattr(intern!(self.py, "name"))?.repr()?;
                self.tokens.bytes(name.to_string_lossy().as_bytes());
                return self.held_by_member(value, depth);
            }
            _ => {}
        }
        if let Some(ints) = ints(value) {
            self.tokens.tag(INTS);
            self.tokens.word(ints.len() as u64);
            ints.into_iter().for_each(|number| self.tokens.word(number.cast_unsigned()));
            return Ok(());
        }
        if let Some(&number) = self.seen.get(&value.as_ptr().addr()) {
            self.tokens.tag(SEEN);
            self.tokens.word(number);
            return Ok(());
        }
        match kind {
            Kind::Dict | Kind::List | Kind::Deque | Kind::Set | Kind::FrozenSet | Kind::Tuple if depth > 0 => {
                self.container(kind, value, depth)
            }
            Kind::Array => self.array(value, depth),
            Kind::Local | Kind::Variable if depth > 0 => {
                self.note(value)?;
                self.identity(value)?;
                let items = self.lists.note_items(value, kind)?;
                self.tokens.word(items.len() as u64);
                items.iter().try_for_each(|item| self.token(item, depth - 1))
            }
            Kind::Method => {
                self.tokens.tag(PARTS);
                self.identity(&value.getattr(intern!(self.py, "__func__"))?)?;
                self.token(&value.getattr(intern!(self.py, "__self__"))?, depth)
            }
            Kind::Partial if depth > 0 => {
                self.tokens.tag(PARTS);
                for part in [intern!(self.py, "func"), intern!(self.py, "args"), intern!(self.py, "keywords")] {
                    self.token(&value.getattr(part)?, depth - 1)?;
                }
                Ok(())
            }
            Kind::Object if depth > 0 => self.object(value, depth),
            _ => self.identity(value),
        }
    }

    /// The value and the attributes of an enumeration's member, whatever its name.
    fn held_by_member(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        if depth == 0 {
            return Ok(());
        }
        if let Some(&number) = self.seen.get(&value.as_ptr().addr()) {
            self.tokens.tag(SEEN);
            self.tokens.word(number);
            return Ok(());
        }
        self.note(value)?;
        match self.own_table(value)? {
            Some(table) => self.attributes_of(value, &table, depth),
            None => Ok(()),
        }
    }

    fn object(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        let is_plain = self.questions.is_plain.call1((value.get_type(),))?.is_truthy()?;
        let slots = if is_plain { Vec::new() } else { self.slots(value)? };
        let table = self.own_table(value)?;
        if table.is_none() && slots.is_empty() {
            return self.identity(value);
        }
        self.note(value)?;
        if !is_plain {
            self.identity(value)?;
        }
        self.in_slots(value, slots, depth)?;
        table.map_or(Ok(()), |table| self.attributes_of(value, &table, depth))
    }

    /// The names of the slots of an object.
    fn slots(&self, value: &Bound<'py, PyAny>) -> PyResult<Vec<Py<PyString>>> {
        self.questions.slots.call1((value.get_type(),))?.extract()
    }

    fn in_slots(&mut self, value: &Bound<'py, PyAny>, slots: Vec<Py<PyString>>, depth: u32) -> PyResult<()> {
        if slots.is_empty() {
            return Ok(());
        }
        for held in self.lists.note_slots(value, slots)? {
            // Of a tensor which it is.
            if self.kind_of(&held) == Kind::Tensor {
                self.identity(&held)?;
            }
            self.token(&held, depth - 1)?;
        }
        Ok(())
    }

    /// What a container or an array has beside its items, if it is of a class of its own.
    fn beside(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        if depth == 0 || self.kinds.get(&value.get_type_ptr().addr()).is_some_and(|(_, class)| is_builtin(class)) {
            return Ok(());
        }
        let slots = self.slots(value)?;
        self.in_slots(value, slots, depth)?;
        match self.own_table(value)? {
            Some(table) => self.attributes_of(value, &table, depth),
            None => Ok(()),
        }
    }

    /// The `__dict__` of an object, if it has one that is nothing but a dictionary.
    fn own_table(&self, value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let table = plain_attribute(value, intern!(self.py, "__dict__"))?;
        Ok(table.and_then(|table| table.cast_into_exact::<PyDict>().ok()))
    }

    fn attributes_of(&mut self, value: &Bound<'py, PyAny>, table: &Bound<'py, PyDict>, depth: u32) -> PyResult<()> {
        self.dicts.note_attributes(value, table)?;
        self.items(table, depth)
    }

    /// An array of numbers: what is in it, as it may be written at any time.
    fn array(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        self.note(value)?;
        self.beside(value, depth)?;
        match self.lists.note_items(value, Kind::Array) {
            Ok(contents) => {
                self.tokens.tag(TEXT);
                for part in contents {
                    match part.cast::<PyBytes>() {
                        Ok(bytes) => self.tokens.bytes(bytes.as_bytes()),
                        Err(_) => self.text(&part)?,
                    }
                }
                Ok(())
            }
            // Of a class that shows them otherwise.
            Err(_) => self.identity(value),
        }
    }

    fn items(&mut self, table: &Bound<'py, PyDict>, depth: u32) -> PyResult<()> {
        let items: Vec<_> = table.iter().filter(|(key, _)| !matches!(self.role(key), Ok(Role::Unread))).collect();
        self.tokens.tag(ITEMS);
        self.tokens.word(items.len() as u64);
        for (key, value) in items {
            self.name(&key)?;
            if !self.float(&value, table, key)? {
                self.token(&value, depth - 1)?;
            }
        }
        Ok(())
    }

    fn container(&mut self, kind: Kind, value: &Bound<'py, PyAny>, depth: u32) -> PyResult<()> {
        if !matches!(kind, Kind::Tuple | Kind::FrozenSet) {
            self.note(value)?;
        }
        self.beside(value, depth)?;
        if kind == Kind::Dict {
            let table = value.cast::<PyDict>()?;
            if table.is_instance(&self.questions.ordered)? && !is_frozen(&table.get_type())? {
                for key in self.lists.note_order(table)? {
                    self.name(&key)?;
                }
            }
            self.dicts.note(table)?;
            return self.items(table, depth);
        }
        let items: Vec<Bound<'py, PyAny>> = match kind {
            Kind::List => self.lists.note_items(value, kind)?,
            Kind::Deque => {
                self.token(&value.getattr(intern!(self.py, "maxlen"))?, depth)?;
                self.lists.note_items(value, kind)?
            }
            Kind::Set => self.lists.note_set(value.cast()?),
            Kind::FrozenSet => value.cast::<PyFrozenSet>()?.iter().collect(),
            _ => value.cast::<PyTuple>()?.iter().collect(),
        };
        self.tokens.tag(ITEMS);
        self.tokens.word(items.len() as u64);
        if matches!(kind, Kind::List | Kind::Deque | Kind::Tuple) {
            for (i, item) in items.iter().enumerate() {
                let is_listed = kind == Kind::List && self.float(item, value, i.into_pyobject(self.py)?.into_any())?;
                if !is_listed {
                    self.token(item, depth - 1)?;
                }
            }
            return Ok(());
        }
        // Items in an order that does not depend on their addresses, as far as their tokens do not.
        self.kept.append(value)?;
        let outer = std::mem::take(&mut self.tokens);
        let mut parts = Vec::new();
        for item in &items {
            self.name(item)?;
            parts.push(std::mem::take(&mut self.tokens).0);
        }
        self.tokens = outer;
        parts.sort_unstable();
        parts.iter().for_each(|part| self.tokens.bytes(part));
        Ok(())
    }

    /// Watches what a LoRA layer reads; what it is at the moment is no part of the structure.
    fn adapters(&mut self, layer: &Bound<'py, PyAny>) -> PyResult<()> {
        let (outer, floats) = (std::mem::take(&mut self.tokens), self.floats.len());
        let mut stack = vec![layer.clone()];
        let mut seen = ByAddress::<()>::default();
        while let Some(module) = stack.pop() {
            if seen.insert(module.as_ptr().addr(), ()).is_some() {
                continue;
            }
            let tables = Tables::of(&module)?;
            self.read_all(&module, &tables)?;
            if module.is(layer) {
                self.attributes(0, &module, &tables, false)?;
            }
            for (name, child) in tables.modules.iter() {
                let is_base = module.is(layer) && name.cast::<PyString>()?.to_str()? == "base_layer";
                if !child.is_none() && !is_base {
                    stack.push(child);
                }
            }
            for table in [&tables.parameters, &tables.buffers] {
                let tensors: Vec<_> = table.values().iter().filter(|t| !t.is_none()).collect();
                for tensor in &tensors {
                    self.own(tensor);
                }
            }
        }
        self.tokens = outer;
        self.floats.truncate(floats);
        Ok(())
    }
}

/// Whether it is the class of diffusers' configurations, which stay as they are; to compare the order of all names of one at each
/// call takes 20 microseconds.
fn is_frozen(class: &Bound<'_, PyType>) -> PyResult<bool> {
    Ok(class.name()? == "FrozenDict" && class.module()?.to_str()?.starts_with("diffusers"))
}

/// Whether instances of a class have nothing but what is in them.
fn is_builtin(class: &Bound<'_, PyType>) -> bool {
    [
        class.is(class.py().get_type::<PyDict>()),
        class.is(class.py().get_type::<PyList>()),
        class.is(class.py().get_type::<PyTuple>()),
    ]
    .contains(&true)
}

/// The numbers of a tuple of ints.
fn ints(value: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
    let tuple = value.cast_exact::<PyTuple>().ok()?;
    tuple.iter().map(|item| item.cast_exact::<PyInt>().ok().and_then(|n| n.extract().ok())).collect()
}

/// Dtype, shape and device of a tensor, and whether its memory holds the negative or the conjugate of what it says.
fn type_of(tokens: &mut Tokens, exchange: Exchange, tensor: &Bound<'_, PyAny>) {
    let mut is_complex = true;
    if let Some(view) = exchange.view_of_weight(tensor) {
        tokens.tag(VALUE);
        tokens.view(&view);
        is_complex = view.dtype.code == DL_COMPLEX;
    } else {
        // What DLPack does not describe: other devices, sparse and quantized tensors.
        tokens.tag(TEXT);
        for name in ["dtype", "device", "shape", "layout"] {
            let text = tensor.getattr(name).and_then(|value| Ok(value.repr()?.to_string_lossy().into_owned()));
            tokens.bytes(text.unwrap_or_default().as_bytes());
        }
    }
    let says = |name: &str| tensor.call_method0(name).and_then(|is| is.is_truthy()).unwrap_or(false);
    for (tag, name) in [(NEGATIVE, "is_neg"), (CONJUGATE, "is_conj")] {
        if (tag == NEGATIVE || is_complex) && says(name) {
            tokens.tag(tag);
        }
    }
}

/// See the stub file.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Tree {
    nodes: Vec<Node>,
    pub(super) dicts: Dicts,
    /// Its own, each once, then those of its adapters.
    pub(super) tensors: Vec<Py<PyAny>>,
    own: usize,
    types: Vec<u8>,
    /// The fingerprint without floats.
    form: [u8; 32],
    floats: Vec<Float>,
    pub(super) lists: Lists,
    kept: Py<PyList>,
    has_other_adapters: bool,
    obstacle: Option<(String, String)>,
}

impl Tree {
    /// Whether a module is of another class now.
    pub(super) fn has_other_classes(&self, _py: Python<'_>) -> bool {
        self.nodes.iter().enumerate().any(|(i, node)| {
            if let Some(ahead) = self.nodes.get(i + AHEAD) {
                prefetch(ahead.module.as_ptr().addr());
            }
            // SAFETY: the module is kept alive by `self`; `_py` proves that the GIL is held.
            unsafe { ffi::Py_TYPE(node.module.as_ptr()) }.addr() != node.class
        })
    }
}

#[pymethods]
impl Tree {
    #[new]
    fn new<'py>(
        module: Bound<'py, PyAny>,
        base_of: Bound<'py, PyAny>,
        obstacle: Bound<'py, PyAny>,
        around: Bound<'py, PyAny>,
        is_plain: Bound<'py, PyAny>,
        slots: Bound<'py, PyAny>,
        adapter: Option<Bound<'py, PyType>>,
    ) -> PyResult<Self> {
        shielded("reading a module", || {
            let py = module.py();
            let ordered = py.import("collections")?.getattr("OrderedDict")?;
            let mut scan = Scan {
                py,
                classes: Classes::get(py)?,
                exchange: Exchange::get(py)?,
                questions: Questions { base_of, obstacle, around, is_plain, slots, ordered, adapter },
                tokens: Tokens::default(),
                kinds: ByAddress::default(),
                roles: ByAddress::default(),
                seen: ByAddress::default(),
                names: ByAddress::default(),
                nodes: Vec::new(),
                dicts: Dicts::new(py),
                lists: Lists::default(),
                kept: PyList::empty(py),
                tensors: Vec::new(),
                places: ByAddress::default(),
                types: Tokens::default(),
                floats: Vec::new(),
                within: None,
                has_other_adapters: false,
                obstacle: None,
            };
            let tables = scan.walk(module)?;
            for (at, tables) in tables.iter().enumerate() {
                scan.entry(at, tables)?;
            }
            if let Some((path, reason)) = scan.obstacle.clone() {
                scan.tokens.bytes(path.as_bytes());
                scan.tokens.bytes(reason.as_bytes());
            }
            let (own, types) = (scan.tensors.len(), std::mem::take(&mut scan.types.0));
            let form = *blake3::hash(&scan.tokens.0).as_bytes();
            let layers: Vec<_> = scan.nodes.iter().filter_map(|n| n.layer.as_ref().map(|l| l.clone_ref(py))).collect();
            for layer in layers {
                scan.adapters(layer.bind(py))?;
            }
            for (_, class) in scan.kinds.values() {
                scan.kept.append(class)?;
            }
            scan.dicts.close();
            Ok(Self {
                nodes: scan.nodes,
                dicts: scan.dicts,
                tensors: scan.tensors,
                own,
                types,
                form,
                floats: scan.floats,
                lists: scan.lists,
                kept: scan.kept.unbind(),
                has_other_adapters: scan.has_other_adapters,
                obstacle: scan.obstacle,
            })
        })
    }

    #[classattr]
    const SKIPPED: &'static [&'static str] = SKIPPED;

    #[getter]
    fn form<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.form)
    }

    #[getter]
    fn floats(&self) -> Vec<f64> {
        self.floats.iter().map(|float| float.value).collect()
    }

    /// The fingerprint, without the values of some floats.
    fn fingerprint<'py>(&self, py: Python<'py>, inputs: Vec<usize>) -> Bound<'py, PyBytes> {
        let mut digest = blake3::Hasher::new();
        digest.update(&self.form);
        let mut inputs = inputs.into_iter().peekable();
        for (at, float) in self.floats.iter().enumerate() {
            match inputs.next_if_eq(&at) {
                Some(_) => digest.update(&[SEEN]),
                None => digest.update(&[VALUE]).update(&float.value.to_bits().to_le_bytes()),
            };
        }
        PyBytes::new(py, digest.finalize().as_bytes())
    }

    /// The container that holds a float, its key or index there, and its name.
    fn place<'py>(&self, py: Python<'py>, at: usize) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, String)> {
        shielded("finding a number", || {
            let Some(float) = self.floats.get(at) else {
                return Err(PyIndexError::new_err("there are fewer floats"));
            };
            let (holder, key) = (float.place.0.bind(py).clone(), float.place.1.bind(py).clone());
            let path = &self.nodes[float.node].path;
            let dot = if path.is_empty() { "" } else { "." };
            let inside = if float.is_attribute { String::new() } else { format!("[{}]", key.repr()?) };
            Ok((holder, key, format!("{path}{dot}{}{inside}", float.attribute.bind(py))))
        })
    }

    fn is_listed_changed(&self, py: Python<'_>) -> bool {
        self.lists.is_changed(py)
    }

    #[getter]
    fn kept(&self, py: Python<'_>) -> Py<PyList> {
        self.kept.clone_ref(py)
    }

    #[getter]
    fn has_other_adapters(&self) -> bool {
        self.has_other_adapters
    }

    #[getter]
    fn obstacle(&self) -> Option<(String, String)> {
        self.obstacle.clone()
    }

    #[getter]
    fn dicts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.dicts.all().iter().map(|dict| dict.bind(py)))
    }

    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.dicts.copies().iter().map(|dict| dict.bind(py)))
    }

    #[getter]
    fn own_tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.tensors[..self.own].iter().map(|tensor| tensor.bind(py)))
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.tensors.iter().map(|tensor| tensor.bind(py)))
    }

    /// Modules by path; the layer inside for a LoRA layer.
    fn modules<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        self.nodes.iter().try_for_each(|node| found.set_item(&node.path, &node.module))?;
        Ok(found)
    }

    /// LoRA layers by path.
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for node in &self.nodes {
            if let Some(layer) = &node.layer {
                found.set_item(&node.path, layer)?;
            }
        }
        Ok(found)
    }

    /// Paths of the modules whose submodules are in one of these dictionaries.
    fn parents(&self, dicts: Vec<usize>) -> Vec<&str> {
        let of = |dict: &usize| {
            let first = dict.checked_sub(MODULES_AT)?;
            let at = self.nodes.binary_search_by_key(&first, |node| node.first_dict).ok()?;
            Some(self.nodes[at].path.as_str())
        };
        dicts.iter().filter_map(of).collect()
    }

    /// Paths of the modules that one of these dictionaries is of, or in whose attributes it was met first.
    fn owners(&self, dicts: Vec<usize>) -> PyResult<Vec<&str>> {
        shielded("naming modules", || {
            let of = |dict: &usize| {
                let is_inner = self.nodes.first().is_some_and(|node| *dict >= node.first_inner);
                let first = |node: &Node| if is_inner { node.first_inner } else { node.first_dict };
                let at = self.nodes.partition_point(|node| first(node) <= *dict).checked_sub(1)?;
                Some(self.nodes[at].path.as_str())
            };
            Ok(dicts.iter().filter_map(of).collect())
        })
    }

    fn is_reclassed(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("reading classes", || Ok(self.has_other_classes(py)))
    }

    fn is_retyped(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("reading tensors", || {
            let (mut now, exchange) = (Tokens::default(), Exchange::get(py)?);
            self.tensors[..self.own].iter().for_each(|tensor| type_of(&mut now, exchange, tensor.bind(py)));
            Ok(now.0 != self.types)
        })
    }

    /// How its own tensors lie in memory, as far as a trace can see it: orders, classes and what shares a storage.
    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        shielded("reading tensors", || {
            let (classes, exchange, layout) = (Classes::get(py)?, Exchange::get(py)?, TensorLayout::get(py));
            let (mut tokens, kinds) = (Tokens::default(), PyList::empty(py));
            let mut storages = ByAddress::<u64>::default();
            for (at, tensor) in self.tensors[..self.own].iter().enumerate() {
                let tensor = tensor.bind(py);
                if !classes.is_plain_tensor(tensor) {
                    kinds.append((at, tensor.get_type()))?;
                }
                let view = exchange.view_of_weight(tensor);
                let storage = match layout {
                    // SAFETY: DLPack describes tensors with a storage alone; it is live and the GIL is held.
                    Some(layout) if view.is_some() => unsafe { layout.read(tensor.as_ptr().cast()) }.storage,
                    _ => match tensor.call_method0("untyped_storage") {
                        Ok(storage) => storage.getattr("_cdata")?.extract()?,
                        // Sparse tensors, and those of a library's own layout, have neither a storage nor strides.
                        Err(error) if error.is_instance_of::<PyNotImplementedError>(py) => {
                            tokens.tag(TEXT);
                            continue;
                        }
                        Err(error) => return Err(error),
                    },
                };
                let order = match view {
                    Some(view) if view.is_dense() => None,
                    Some(view) => Some(view.strides.to_vec()),
                    None if tensor.call_method0("is_contiguous")?.is_truthy()? => None,
                    None => Some(tensor.call_method0("stride")?.extract()?),
                };
                let first = *storages.entry(storage).or_insert(at as u64);
                tokens.word(at as u64 - first);
                match order {
                    None => tokens.tag(ABSENT),
                    Some(strides) => strides.into_iter().for_each(|s| tokens.word(s.cast_unsigned())),
                }
            }
            (PyBytes::new(py, blake3::hash(&tokens.0).as_bytes()), kinds.to_tuple()).into_pyobject(py)
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for node in &self.nodes {
            visit.call(&node.module)?;
            visit.call(&node.layer)?;
        }
        self.dicts.traverse(&visit)?;
        self.tensors.iter().try_for_each(|tensor| visit.call(tensor))?;
        for float in &self.floats {
            visit.call(&float.place.0)?;
            visit.call(&float.place.1)?;
        }
        self.lists.traverse(&visit)?;
        visit.call(&self.kept)
    }
}
