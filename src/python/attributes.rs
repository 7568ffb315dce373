//! What the names and classes of attributes say about them: for [`super::tree`].

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Tables of `nn.Module` that do not change what a call under no_grad computes, or that are handled by name.
pub(super) const SKIPPED: &[&str] = &[
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_compiled_call_impl",
    "_output_capturing_hooks_installed",
];
/// Attributes and entries of configurations that say where a checkpoint came from, not what it computes.
const UNREAD: &[&str] =
    &["_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version", "transformers_version"];
/// Attributes of a diffusers or transformers model that come and go with adapters, whose effect is seen in their layers.
const ADAPTERS: &[&str] =
    &["peft_config", "_hf_peft_config_loaded", "lora_scale", "_adapter_names", "_safe_fusing", "_weight_conversions"];
/// Attributes under which hooks of accelerate and diffusers hang.
const HOOKS: &[&str] = &["_hf_hook", "_diffusers_hook"];

/// What the name of an attribute says about it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Read,
    Skipped,
    /// Where the module came from: read only if it is no scalar.
    Unread,
    Adapter,
    Hook,
}

pub(super) fn role_of(name: &str) -> Role {
    match name {
        _ if SKIPPED.contains(&name) => Role::Skipped,
        _ if UNREAD.contains(&name) => Role::Unread,
        _ if ADAPTERS.contains(&name) => Role::Adapter,
        _ if HOOKS.contains(&name) => Role::Hook,
        _ => Role::Read,
    }
}

/// What is known of a value from its class.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    None,
    Bool,
    Int,
    Float,
    Text,
    Bytes,
    Complex,
    DType,
    Device,
    Size,
    Tensor,
    Module,
    Class,
    Enum,
    Dict,
    List,
    Set,
    FrozenSet,
    Tuple,
    Deque,
    /// Numbers in memory, without a class for each: of numpy, `array`, `bytearray`, `memoryview`.
    Array,
    /// `threading.local`: what is in it is another thing in each thread.
    Local,
    /// `contextvars.ContextVar`.
    Variable,
    Method,
    Partial,
    /// A function, a Python module.
    Opaque,
    Object,
}

impl Kind {
    pub(super) const fn is_scalar(self) -> bool {
        matches!(
            self,
            Self::None
                | Self::Bool
                | Self::Int
                | Self::Float
                | Self::Text
                | Self::Bytes
                | Self::Complex
                | Self::DType
                | Self::Device
                | Self::Size
        )
    }

    /// Whether a value can be described without running code of Python's.
    pub(super) const fn is_plain(self) -> bool {
        self.is_scalar() && !matches!(self, Self::Complex | Self::Device | Self::Size)
    }
}

/// Classes by which values are told apart: those that are exactly of one, then those that may be of a subclass.
pub(super) struct Classes {
    exact: Vec<(Py<PyType>, Kind)>,
    base: Vec<(Py<PyType>, Kind)>,
    /// Classes of tensors that are nothing but tensors.
    plain_tensors: Vec<Py<PyType>>,
}

impl Classes {
    pub(super) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
        CLASSES.get_or_try_init(py, || {
            let of = |module: &str, name: &str| -> PyResult<Py<PyType>> {
                Ok(py.import(module)?.getattr(name)?.cast_into::<PyType>()?.unbind())
            };
            let exact = [
                ("builtins", "bool", Kind::Bool),
                ("builtins", "int", Kind::Int),
                ("builtins", "float", Kind::Float),
                ("builtins", "str", Kind::Text),
                ("builtins", "bytes", Kind::Bytes),
                ("builtins", "complex", Kind::Complex),
                ("torch", "dtype", Kind::DType),
                ("torch", "device", Kind::Device),
                ("torch", "Size", Kind::Size),
            ];
            let base = [
                ("torch", "Tensor", Kind::Tensor),
                ("torch.nn", "Module", Kind::Module),
                ("builtins", "type", Kind::Class),
                ("enum", "Enum", Kind::Enum),
                ("builtins", "dict", Kind::Dict),
                ("builtins", "list", Kind::List),
                ("builtins", "tuple", Kind::Tuple),
                ("builtins", "set", Kind::Set),
                ("builtins", "frozenset", Kind::FrozenSet),
                ("collections", "deque", Kind::Deque),
                ("numpy", "ndarray", Kind::Array),
                ("array", "array", Kind::Array),
                ("builtins", "bytearray", Kind::Array),
                ("builtins", "memoryview", Kind::Array),
                ("_thread", "_local", Kind::Local),
                ("contextvars", "ContextVar", Kind::Variable),
                ("types", "MethodType", Kind::Method),
                ("functools", "partial", Kind::Partial),
                ("types", "FunctionType", Kind::Opaque),
                ("types", "ModuleType", Kind::Opaque),
            ];
            let mut exact = exact
                .into_iter()
                .map(|(module, name, kind)| Ok((of(module, name)?, kind)))
                .collect::<PyResult<Vec<_>>>()?;
            exact.push((py.None().bind(py).get_type().unbind(), Kind::None));
            let base = base.into_iter().map(|(module, name, kind)| Ok((of(module, name)?, kind)));
            Ok(Self {
                exact,
                base: base.collect::<PyResult<_>>()?,
                plain_tensors: vec![of("torch", "Tensor")?, of("torch.nn", "Parameter")?, of("torch.nn", "Buffer")?],
            })
        })
    }

    pub(super) fn kind_of(&self, class: &Bound<'_, PyType>) -> Kind {
        let at = class.as_ptr();
        if let Some((_, kind)) = self.exact.iter().find(|(known, _)| known.as_ptr() == at) {
            return *kind;
        }
        // SAFETY: both are live classes; nothing but their method resolution orders is read.
        let is_of = |base: &Py<PyType>| unsafe { ffi::PyType_IsSubtype(at.cast(), base.as_ptr().cast()) != 0 };
        self.base.iter().find(|(base, _)| is_of(base)).map_or(Kind::Object, |(_, kind)| *kind)
    }

    pub(super) fn is_plain_tensor(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let class = tensor.get_type_ptr();
        self.plain_tensors.iter().any(|known| known.as_ptr() == class.cast())
    }
}
