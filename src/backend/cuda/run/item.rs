//! What a run is made of: launches of kernels, and steps that libraries compute.

use std::sync::{Arc, OnceLock};

use super::super::NAME;
use super::super::delegate::{Planned, WORKSPACE_ALIGN_BYTES};
use super::super::driver::{StreamHandle, launch};
use super::call::Call;
use crate::{Error, Result};

/// What a library's work is on, and what is around it.
#[derive(Debug)]
pub(super) struct Parts {
    /// As in [`Call::places`], for each call of the library.
    pub calls: Vec<Vec<Option<(usize, isize)>>>,
    /// What must be done first.
    pub before: Vec<Call>,
    /// What is left of the step.
    pub after: Vec<Call>,
}

/// A step that a library computes.
#[derive(Debug)]
pub(super) struct Delegated {
    pub step: usize,
    pub planned: Arc<dyn Planned>,
    pub parts: Parts,
    /// What the address of each operand must be a multiple of.
    pub align_bytes: Vec<usize>,
    /// Buffer of the library's workspace.
    pub workspace: Option<usize>,
    /// All of the step, for addresses that the library was not planned for.
    pub own: Vec<Call>,
    /// Index into the specialization's choices.
    pub choice: usize,
    /// What the library said when it was run, if it did not: from then on the step runs on its own kernels.
    pub failure: OnceLock<String>,
}

pub(super) fn address(place: Option<(usize, isize)>, bases: &[u64]) -> u64 {
    place.map_or(0, |(buffer, offset)| bases[buffer].wrapping_add_signed(offset as i64))
}

/// Launches kernels in order.
///
/// # Safety
/// Every buffer must be behind its address.
pub(super) unsafe fn launch_all(calls: &[Call], bases: &[u64], stream: StreamHandle) -> Result<()> {
    for call in calls.iter().filter(|call| call.is_on(bases)) {
        let mut bound = call.bind(bases);
        // SAFETY: the caller's promise.
        unsafe { launch(bound.function, &bound.geometry, &mut bound.words, stream)? };
    }
    Ok(())
}

impl Parts {
    /// The library's part, by any of its ways.
    ///
    /// # Safety
    /// As [`Delegated::run`]; the workspace must have what `planned` asks for and room to align it.
    pub unsafe fn run_planned(
        &self,
        planned: &dyn Planned,
        workspace: u64,
        bases: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let workspace = workspace.next_multiple_of(WORKSPACE_ALIGN_BYTES as u64);
        for places in &self.calls {
            let addresses: Vec<u64> = places.iter().map(|p| address(*p, bases)).collect();
            // SAFETY: the caller's promise.
            unsafe { planned.run(&addresses, workspace, stream)? };
        }
        Ok(())
    }
}

impl Delegated {
    /// Whether the library runs: the addresses are such as it was asked for, and it has not failed.
    pub fn is_on(&self, bases: &[u64]) -> bool {
        let fits =
            |(place, bytes): (&Option<(usize, isize)>, &usize)| address(*place, bases).is_multiple_of(*bytes as u64);
        self.failure.get().is_none()
            && self.parts.calls.iter().all(|places| places.iter().zip(&self.align_bytes).all(fits))
    }

    /// Runs it; a library that fails is noted.
    ///
    /// # Safety
    /// Every buffer must be behind its address, or be left out.
    pub unsafe fn run(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put(bases, stream, |e| drop(self.failure.set(e.to_string()))) }
    }

    /// Gives it to a stream that is captured for a graph of our own. A library that fails there is not noted: what it refuses
    /// may be to be captured.
    ///
    /// # Safety
    /// As [`Delegated::run`].
    pub unsafe fn record(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put(bases, stream, |_| ()) }
    }

    /// # Safety
    /// As [`Delegated::run`].
    unsafe fn put(&self, bases: &[u64], stream: StreamHandle, on_failure: impl FnOnce(&Error)) -> Result<()> {
        if !self.is_on(bases) {
            if self.own.iter().any(|c| c.reads_left_out(bases)) {
                // It failed after the addresses were taken, in another thread: the run is done again.
                return Err(Error::Backend { backend: NAME, what: "a library failed meanwhile".to_owned() });
            }
            // SAFETY: the caller's promise; nothing that is read was left out.
            return unsafe { launch_all(&self.own, bases, stream) };
        }
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.parts.before, bases, stream)? };
        let workspace = self.workspace.map_or(0, |buffer| bases[buffer]);
        // SAFETY: the caller's promise; the workspace was placed with the bytes that were asked for, and room to align it.
        unsafe { self.parts.run_planned(&*self.planned, workspace, bases, stream) }.inspect_err(on_failure)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.parts.after, bases, stream) }
    }

    fn host_bytes(&self) -> usize {
        let own = self.parts.before.iter().chain(&self.parts.after).chain(&self.own).map(Call::bytes).sum::<usize>();
        let places = self.parts.calls.iter().map(|places| size_of_val(places) + size_of_val(&**places)).sum::<usize>();
        size_of::<Self>() + own + places + size_of_val(&*self.align_bytes)
    }

    pub fn reads(&self, changed: &[bool]) -> bool {
        let of_calls = |calls: &[Call]| calls.iter().any(|c| c.reads(changed));
        self.parts.calls.iter().flatten().flatten().any(|(buffer, _)| changed[*buffer])
            || self.workspace.is_some_and(|w| changed[w])
            || of_calls(&self.parts.before)
            || of_calls(&self.parts.after)
            || of_calls(&self.own)
    }
}

/// One thing after the other.
#[derive(Debug)]
pub(super) enum Item {
    Kernel(Call),
    Delegated(Delegated),
}

impl Item {
    pub fn delegated(&self) -> Option<&Delegated> {
        match self {
            Self::Kernel(_) => None,
            Self::Delegated(delegated) => Some(delegated),
        }
    }

    pub fn step(&self) -> usize {
        match self {
            Self::Kernel(call) => call.step,
            Self::Delegated(delegated) => delegated.step,
        }
    }

    pub fn host_bytes(&self) -> usize {
        match self {
            Self::Kernel(call) => call.bytes(),
            Self::Delegated(delegated) => delegated.host_bytes(),
        }
    }

    pub fn reads(&self, changed: &[bool]) -> bool {
        match self {
            Self::Kernel(call) => call.reads(changed),
            Self::Delegated(delegated) => delegated.reads(changed),
        }
    }

    /// # Safety
    /// Every buffer must be behind its address.
    pub unsafe fn run(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Self::Kernel(call) => unsafe { launch_all(std::slice::from_ref(call), bases, stream) },
            // SAFETY: the caller's promise.
            Self::Delegated(delegated) => unsafe { delegated.run(bases, stream) },
        }
    }
}
