//! The scan of a module: one walk over its tree, which writes what a [`Tree`](super::tree::Tree) says.
//!
//! Each dictionary's version is from before it was read. Nothing of Python's runs while a dictionary is iterated: what might run
//! code is set aside until the end of it.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString, PyTuple, PyType};
use pyo3::{Borrowed, ffi, intern};

use super::addresses::ByAddress;
use super::attributes::{Classes, Kind, Role, role_of};
use super::lists::{Lists, plain_attribute};
use super::tensor::Exchange;
use super::tokens::{ABSENT, IDENTITY, INTS, ITEMS, LONG, NODE, PARTS, SEEN, TENSOR, TEXT, Tokens, VALUE, type_of};
use super::versions::Dicts;

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
pub(super) struct Questions<'py> {
    pub(super) base_of: Bound<'py, PyAny>,
    pub(super) obstacle: Bound<'py, PyAny>,
    pub(super) around: Bound<'py, PyAny>,
    pub(super) is_plain: Bound<'py, PyAny>,
    pub(super) slots: Bound<'py, PyAny>,
    /// `collections.OrderedDict`.
    pub(super) ordered: Bound<'py, PyAny>,
    /// The class of the layers that PEFT puts around others, where it is imported.
    pub(super) adapter: Option<Bound<'py, PyType>>,
}

/// Attributes of a module that are about what is around it, and what stands for them.
type Around<'py> = (Vec<String>, Vec<Bound<'py, PyAny>>);

/// A float in an attribute, or in a container there.
pub(super) struct Float {
    pub(super) value: f64,
    /// The number of the module that has the attribute.
    pub(super) node: usize,
    pub(super) attribute: Py<PyAny>,
    /// The dictionary or list that holds it, and where.
    pub(super) place: (Py<PyAny>, Py<PyAny>),
    /// Whether it is the attribute itself.
    pub(super) is_attribute: bool,
}

/// One module.
pub(super) struct Node {
    pub(super) path: String,
    pub(super) module: Py<PyAny>,
    /// The address of its class, which is kept.
    pub(super) class: usize,
    /// The LoRA layer around it.
    pub(super) layer: Option<Py<PyAny>>,
    /// Where the first of its dictionaries is.
    pub(super) first_dict: usize,
    /// Where the first of the dictionaries is that its attributes hold, behind those of all modules.
    pub(super) first_inner: usize,
}

/// The dictionaries of one module, in the order in which they are listed.
pub(super) struct Tables<'py> {
    attributes: Bound<'py, PyDict>,
    parameters: Bound<'py, PyDict>,
    buffers: Bound<'py, PyDict>,
    modules: Bound<'py, PyDict>,
    hooks: Bound<'py, PyDict>,
    pre_hooks: Bound<'py, PyDict>,
}

/// Where `_modules` is among the dictionaries of a module.
pub(super) const MODULES_AT: usize = 3;

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

/// A scan under way, and what it found.
pub(super) struct Scan<'py> {
    py: Python<'py>,
    classes: &'static Classes,
    exchange: Exchange,
    questions: Questions<'py>,
    pub(super) tokens: Tokens,
    pub(super) kinds: ByAddress<(Kind, Bound<'py, PyType>)>,
    /// Roles of names by the address of the string, which is kept.
    roles: ByAddress<(Role, Bound<'py, PyAny>)>,
    /// Numbers of the tensors and values that were met.
    seen: ByAddress<u64>,
    /// Numbers of modules; a LoRA layer has that of the layer inside.
    names: ByAddress<u64>,
    pub(super) nodes: Vec<Node>,
    pub(super) dicts: Dicts,
    pub(super) lists: Lists,
    pub(super) kept: Bound<'py, PyList>,
    pub(super) tensors: Vec<Py<PyAny>>,
    /// Places of tensors among `tensors`.
    places: ByAddress<()>,
    /// Dtypes, shapes and devices of `tensors`.
    pub(super) types: Tokens,
    pub(super) floats: Vec<Float>,
    /// The module and the attribute that are being described.
    within: Option<(usize, Bound<'py, PyAny>)>,
    pub(super) has_other_adapters: bool,
    pub(super) obstacle: Option<(String, String)>,
}

impl<'py> Scan<'py> {
    pub(super) fn new(py: Python<'py>, questions: Questions<'py>) -> PyResult<Self> {
        Ok(Self {
            py,
            classes: Classes::get(py)?,
            exchange: Exchange::get(py)?,
            questions,
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
        })
    }

    /// Reads a module and all in it, its adapters aside.
    pub(super) fn read(&mut self, root: Bound<'py, PyAny>) -> PyResult<()> {
        let tables = self.walk(root)?;
        for (at, tables) in tables.iter().enumerate() {
            self.entry(at, tables)?;
        }
        if let Some((path, reason)) = &self.obstacle {
            self.tokens.bytes(path.as_bytes());
            self.tokens.bytes(reason.as_bytes());
        }
        Ok(())
    }

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
    pub(super) fn adapters(&mut self, layer: &Bound<'py, PyAny>) -> PyResult<()> {
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
