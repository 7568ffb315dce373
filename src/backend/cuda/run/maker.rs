//! Makes the items of a specialization of the steps of a plan: launches, or what a library does.

use std::sync::{Arc, OnceLock};

use super::super::delegate::{self, Asked, Operands, Planned, WORKSPACE_ALIGN_BYTES};
use super::super::lower::{self, Instead, Launch, Launches, Place};
use super::super::{NAME, Program};
use super::call::{Call, Word, unsigned, vector_form, words};
use super::item::{Delegated, Item, Parts};
use super::places::{LAID_OUT, LaidOut, TOLD, first_scratch, first_told, is_low};
use super::trial::Sites;
use crate::backend::StepChoice;
use crate::codegen::cuda::{Arg, GEMV_ROWS, Geometry, chunk_count};
use crate::memory::ALIGN_BYTES;
use crate::plan::Step;
use crate::plan::workspace::Scratch;
use crate::select::Kernel as Select;
use crate::{Error, Result};

/// Makes the calls of steps.
pub(super) struct Maker<'a> {
    pub(super) program: &'a Program,
    pub(super) bindings: &'a [i64],
    pub(super) scratch: Vec<Scratch>,
    pub(super) choices: Vec<StepChoice>,
    pub(super) sites: Sites,
    pub(super) laid_out: Vec<LaidOut>,
    /// Which of the scratch memory only trials use.
    pub(super) tried: Vec<usize>,
}

impl<'a> Maker<'a> {
    fn asked<'b>(program: &'b Program, step: &'b Step, bindings: &'b [i64]) -> Asked<'b> {
        let (arch, numerics) = (program.device.arch(), program.plan.options.numerics);
        let is_bounded = program.plan.options.memory_budget.is_some();
        Asked { step, bindings, arch, numerics, fold_flops: program.delegates.fold_flops(), is_bounded }
    }

    /// Whether the kernel for few rows takes the step.
    fn is_few(launches: &Launches, bindings: &[i64]) -> Result<bool> {
        let few = |l: &Launch| match &l.instead {
            Some(Instead::OfNext(rows)) => Ok(rows.eval(bindings)? <= GEMV_ROWS as i64),
            Some(Instead::OfAll) | None => Ok(false),
        };
        Ok(launches.launches.iter().map(few).collect::<Result<Vec<bool>>>()?.contains(&true))
    }

    /// Lets cuDNN build the plans of all steps that it may be asked for, several at the same time.
    pub(super) fn warm(program: &Program, bindings: &[i64]) {
        let mut engines = Vec::new();
        for (step, launches) in program.plan.steps.iter().zip(&program.lowered.steps) {
            let asked = Self::asked(program, step, bindings);
            for graph in launches.delegate.iter().flat_map(|d| d.graphs(&asked)) {
                let engine = (graph, None);
                if !engines.contains(&engine) {
                    engines.push(engine);
                }
            }
        }
        // One alone is built where it is needed, if it is.
        if engines.len() > 1 {
            program.delegates.warm(engines, None, || program.device.enter());
        }
    }
}

impl Maker<'_> {
    fn scratch_bytes(&self, scratch: &lower::Scratch) -> Result<usize> {
        let lower::Scratch::Moments { sets, pixels } = scratch;
        let chunks = chunk_count(unsigned(pixels.eval(self.bindings)?)?);
        let floats = unsigned(sets.eval(self.bindings)?)?.saturating_mul(chunks).saturating_mul(3);
        usize::try_from(floats.saturating_mul(4)).map_err(|_| Error::invalid("scratch memory overflows"))
    }

    /// The buffer that the next scratch memory is: it follows the plan's buffers and the forms of its packed weights.
    fn next_scratch(&self) -> usize {
        first_scratch(&self.program.plan) + self.scratch.len()
    }

    fn is_empty(&self, step: &Step) -> bool {
        step.stores.iter().map(|s| s.concrete(self.bindings)).all(|s| s.is_ok_and(|s| s.numel() == 0))
    }

    /// The step on a library, if there is one for it.
    pub(super) fn step(&mut self, at: usize, step: &Step, launches: &Launches, items: &mut Vec<Item>) -> Result<()> {
        if self.is_empty(step) {
            return Ok(());
        }
        if let Some(delegate) = &launches.delegate {
            let Program { plan, delegates, lowered, device, .. } = self.program;
            let arch = device.arch();
            let name = |l: &Launch| lowered.kernels[l.kernel].name.clone();
            let kernels = |form: &delegate::Form| {
                launches.launches.iter().chain(&form.before).chain(&form.after).map(name).collect()
            };
            let ready = match Self::is_few(launches, self.bindings)? {
                true => Err(("it has few rows".to_owned(), None)),
                false => delegate.plan(&Self::asked(self.program, step, self.bindings), delegates, &kernels),
            };
            let outcome = ready.as_ref().map(|r| r.planned.library()).map_err(|(why, _)| why.clone());
            self.choices.push(delegate::choice(plan.step_name(step), outcome));
            match ready {
                Ok(ready) => {
                    let delegate::Ready { planned, operands, form, site, whole } = ready;
                    let whole = whole.map(|(form, operands)| self.tried(at, delegate.0.get(form), operands));
                    self.sites.add(site, Some(items.len()), whole.transpose()?);
                    let form = delegate.0.get(form);
                    items.push(Item::Delegated(self.delegated(at, step, launches, form, planned, operands)?));
                    return Ok(());
                }
                Err((_, Some(site))) => self.sites.add(*site, None, None),
                Err((_, None)) if step.kernel == Select::Attention && !launches.on_tensor_cores(arch) => {
                    if let Ok((planned, operands)) = self.chunks(step, delegates)? {
                        if let Some(last) = self.choices.last_mut() {
                            *last = delegate::choice(plan.step_name(step), Ok(planned.library()));
                        }
                        items.push(Item::Delegated(self.delegated(at, step, launches, None, planned, operands)?));
                        return Ok(());
                    }
                }
                Err((_, None)) => {}
            }
        }
        let mut calls = Vec::new();
        self.kernels(at, step, launches, &mut calls)?;
        items.extend(calls.into_iter().map(Item::Kernel));
        Ok(())
    }

    fn delegated(
        &mut self,
        at: usize,
        step: &Step,
        launches: &Launches,
        form: Option<&delegate::Form>,
        planned: Arc<dyn Planned>,
        mut operands: Operands,
    ) -> Result<Delegated> {
        let mut own = Vec::new();
        self.kernels(at, step, launches, &mut own)?;
        let align_bytes = std::mem::take(&mut operands.align_bytes);
        let parts = self.parts(at, form, operands)?;
        let mut workspace = None;
        if planned.workspace_bytes() > 0 {
            workspace = Some(self.next_scratch());
            let bytes = planned.workspace_bytes() + (WORKSPACE_ALIGN_BYTES - ALIGN_BYTES);
            self.scratch.push(Scratch { step: at, bytes, what: "workspace of a library" });
        }
        let (choice, failure) = (self.choices.len() - 1, OnceLock::new());
        Ok(Delegated { step: at, planned, parts, align_bytes, workspace, own, choice, failure })
    }

    /// A library's operands and the kernels around it, with places.
    fn parts(&mut self, at: usize, form: Option<&delegate::Form>, operands: Operands) -> Result<Parts> {
        let first = self.next_scratch();
        for (bytes, what) in operands.scratch {
            self.scratch.push(Scratch { step: at, bytes, what });
        }
        let mut places = operands.places.iter().map(|p| self.place(p, first)).collect::<Result<Vec<_>>>()?;
        let mut before = Vec::new();
        for (place, to) in operands.places.iter().zip(&mut places) {
            if let (Place::Taps(pack), true) = (place, is_low(&self.program.plan)) {
                let call = self.lay_out(at, *pack)?;
                *to = call.places[0];
                before.push(call);
            }
        }
        let moved = |offsets: &Vec<isize>| {
            let moves = places.iter().zip(offsets);
            moves.map(|(place, more)| place.map(|(buffer, offset)| (buffer, offset + more))).collect()
        };
        let calls = operands.calls.iter().map(moved).collect();
        let around = |launch: Option<&Launch>| -> Result<Vec<Call>> {
            Ok(launch.map(|l| self.call(at, l, first)).transpose()?.flatten().into_iter().collect())
        };
        before.extend(around(form.and_then(|f| f.before.as_ref()))?);
        let after = around(form.and_then(|f| f.after.as_ref()))?;
        Ok(Parts { calls, before, after })
    }

    /// The parts of a form that is only tried: its scratch memory is a trial's.
    fn tried(&mut self, at: usize, form: Option<&delegate::Form>, operands: Operands) -> Result<Parts> {
        let first = self.scratch.len();
        let parts = self.parts(at, form, operands)?;
        self.tried.extend(first..self.scratch.len());
        Ok(parts)
    }

    /// Where an operand lies; scratch memory of its step begins at buffer `first`.
    fn place(&self, place: &Place, first: usize) -> Result<Option<(usize, isize)>> {
        Ok(match place {
            Place::Buffer(buffer, offset, size) => {
                Some((buffer.index(), offset.eval(self.bindings)? as isize * *size as isize))
            }
            Place::Scratch(index) => Some((first + index, 0)),
            Place::Taps(pack) => Some((self.program.plan.buffers.len() + pack, 0)),
            Place::Sums(pack) => {
                let plan = &self.program.plan;
                Some((plan.buffers.len() + plan.packs.len() + pack, 0))
            }
            Place::Missing => None,
        })
    }

    /// A launch with numbers; `None` where there is nothing to do.
    fn call(&self, at: usize, launch: &Launch, first: usize) -> Result<Option<Call>> {
        let Some(plain) = launch.grid.geometry(self.bindings, launch.least)? else { return Ok(None) };
        Ok(Some(Call {
            step: at,
            entry: self.program.entries[launch.kernel],
            words: words(&launch.args, self.bindings)?,
            places: launch.places.iter().map(|p| self.place(p, first)).collect::<Result<_>>()?,
            plain,
            vector: vector_form(launch, self.bindings)?,
            only_if: None,
        }))
    }

    /// What lays out a packed weight with its channels as neighbours, in scratch memory of a step: its only place.
    fn lay_out(&mut self, at: usize, pack: usize) -> Result<Call> {
        let Program { plan, lowered, entries, .. } = self.program;
        let weight = plan.packs[pack].source.concrete(self.bindings)?;
        let size = weight.dtype.size_bytes();
        let known = lowered.layouts.iter().find(|(bytes, _)| *bytes == size).map(|(_, launch)| launch);
        let (Some(launch), [filters, channels, taps @ ..]) = (known, &*weight.shape) else {
            return Err(Error::Backend { backend: NAME, what: "a weight that has no layout".to_owned() });
        };
        let (told, buffer) = (first_told(plan, pack), self.next_scratch());
        let mut sizes = [1i64; 2 * (TOLD - 1)];
        [filters, channels].iter().zip(&mut sizes).for_each(|(n, to)| *to = **n as i64);
        taps.iter().rev().zip(sizes[..TOLD - 1].iter_mut().rev()).for_each(|(n, to)| *to = *n as i64);
        let word = |arg: &Arg| match arg {
            Arg::Pointer(0) => Ok(Word::Told(told)),
            Arg::Pointer(_) => Ok(Word::Pointer(0)),
            Arg::Size(dim) => match (TOLD - 1..sizes.len()).find(|&s| *dim == lower::symbol(s)) {
                Some(stride) => Ok(Word::Told(told + stride + 2 - TOLD)),
                None => dim.eval(&sizes).map(|n| Word::Number(n.cast_unsigned())),
            },
            _ => Err(Error::invalid("a layout of other arguments")),
        };
        let words = launch.args.iter().map(word).collect::<Result<_>>()?;
        let plain = launch.grid.geometry(&sizes, 1)?;
        let plain = plain.ok_or_else(|| Error::invalid("an empty weight"))?;
        self.scratch.push(Scratch { step: at, bytes: weight.numel() * size, what: LAID_OUT });
        self.laid_out.push(LaidOut { pack, buffer, told });
        let (entry, places) = (entries[launch.kernel], vec![Some((buffer, 0))]);
        Ok(Call { step: at, entry, words, places, plain, vector: None, only_if: Some(told) })
    }

    /// The step on its own kernels.
    pub(super) fn kernels(&mut self, at: usize, step: &Step, launches: &Launches, calls: &mut Vec<Call>) -> Result<()> {
        if self.is_empty(step) {
            return Ok(());
        }
        let first = self.next_scratch();
        if let Some(whole) = launches.launches.first().filter(|l| l.instead == Some(Instead::OfAll))
            && self.has_room(whole)
        {
            calls.extend(self.call(at, whole, first)?);
            return Ok(());
        }
        for scratch in &launches.scratch {
            let bytes = self.scratch_bytes(scratch)?;
            self.scratch.push(Scratch { step: at, bytes, what: "moments" });
        }
        let mut skip = false;
        for launch in &launches.launches {
            if std::mem::take(&mut skip) {
                continue;
            }
            match &launch.instead {
                Some(Instead::OfAll) => continue,
                Some(Instead::OfNext(rows)) if rows.eval(self.bindings)? > GEMV_ROWS as i64 => continue,
                Some(Instead::OfNext(_)) => skip = true,
                None => {}
            }
            calls.extend(self.call(at, launch, first)?);
        }
        Ok(())
    }

    /// Whether a block of the device has the shared memory that a launch asks for.
    fn has_room(&self, launch: &Launch) -> bool {
        let room = self.program.device.shared_bytes();
        let fits = |geometry: Option<Geometry>| geometry.is_none_or(|geometry| geometry.shared_bytes <= room);
        launch.grid.geometry(self.bindings, launch.least).is_ok_and(fits)
    }
}
