//! The arena of a plan for concrete sizes: which buffer lies where, from which step to which.

use std::fmt::Write as _;
use std::sync::Arc;

use super::liveness::{self, LiveRange};
use super::{BufferId, Plan};
use crate::memory::{self, Layout, Request};
use crate::{Error, Result};

/// What a step needs besides the plan's buffers, for as long as it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// Index of the step.
    pub step: usize,
    /// Size.
    pub bytes: usize,
    /// What it holds, for reports.
    pub what: &'static str,
}

/// The buffers of a run, placed; see the module documentation.
#[derive(Clone, Debug)]
pub struct Workspace {
    plan: Option<Arc<Plan>>,
    /// The plan's buffers, then the scratch memory of steps.
    pub requests: Vec<Request>,
    /// The plan's buffers behind the first requests.
    pub buffers: Vec<BufferId>,
    scratch: Vec<Scratch>,
    /// Where each request lies.
    pub layout: Layout,
}

impl Workspace {
    /// For runs that need none.
    pub fn none() -> Self {
        Self { plan: None, requests: vec![], buffers: vec![], scratch: vec![], layout: Layout::default() }
    }

    /// Places the plan's temporaries and `scratch`.
    ///
    /// # Errors
    /// If a size is negative, not an integer or too large.
    pub fn of(plan: &Arc<Plan>, bindings: &[i64], scratch: &[Scratch]) -> Result<Self> {
        Self::of_ranges(plan, &liveness::arena(plan), bindings, scratch)
    }

    /// The same with the live ranges known, which depend on no sizes.
    ///
    /// # Errors
    /// As [`Workspace::of`].
    pub fn of_ranges(
        plan: &Arc<Plan>,
        arena: &[(BufferId, LiveRange)],
        bindings: &[i64],
        scratch: &[Scratch],
    ) -> Result<Self> {
        let count = arena.len() + scratch.len();
        let (mut requests, mut buffers) = (Vec::with_capacity(count), Vec::with_capacity(arena.len()));
        for &(id, range) in arena {
            requests.push(Request { bytes: buffer_bytes(plan, id, bindings)?, first: range.first, last: range.last });
            buffers.push(id);
        }
        requests.extend(scratch.iter().map(|s| Request { bytes: s.bytes, first: s.step, last: s.step }));
        let layout = memory::solve(&requests)?;
        if crate::config::config().verify {
            memory::verify::verify(&requests, &layout)?;
        }
        Ok(Self { plan: Some(plan.clone()), requests, buffers, scratch: scratch.to_vec(), layout })
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.layout.bytes
    }

    /// Module path of a request, and what lies in it.
    pub fn name(&self, request: usize) -> (String, String) {
        let Some(plan) = &self.plan else { return Default::default() };
        match self.buffers.get(request) {
            Some(id) => {
                let value = plan.buffers[id.index()].value;
                (plan.graph.path(value).to_owned(), format!("{id} %{} {}", value.0, plan.graph.op(value).name()))
            }
            None => {
                let scratch = self.scratch[request - self.buffers.len()];
                let path = plan.graph.path(plan.steps[scratch.step].value).to_owned();
                (path, format!("{} of step {}", scratch.what, scratch.step))
            }
        }
    }

    /// Bytes alive at every step.
    pub fn timeline(&self) -> Vec<usize> {
        let steps = self.plan.as_ref().map_or(0, |plan| plan.steps.len());
        let mut bytes = vec![0; steps];
        for request in &self.requests {
            bytes[request.first..=request.last].iter_mut().for_each(|b| *b += request.bytes);
        }
        bytes
    }

    /// The step with most alive, and what lives then, largest first.
    pub fn peak(&self) -> (usize, Vec<usize>) {
        let timeline = self.timeline();
        let step = (0..timeline.len()).max_by_key(|&s| (timeline[s], std::cmp::Reverse(s))).unwrap_or(0);
        let alive = |r: &Request| r.first <= step && step <= r.last && r.bytes > 0;
        let mut then: Vec<usize> = (0..self.requests.len()).filter(|&i| alive(&self.requests[i])).collect();
        then.sort_by_key(|&i| std::cmp::Reverse(self.requests[i].bytes));
        (step, then)
    }

    /// One line that says where the bytes of the peak are, the `count` largest buffers by name.
    pub fn peak_text(&self, count: usize) -> String {
        let (step, then) = self.peak();
        let Some(plan) = &self.plan else { return "nothing".to_owned() };
        let mut text = plan.steps.get(step).map_or(String::new(), |s| format!("at {}: ", plan.step_name(s)));
        for (at, &i) in then.iter().take(count).enumerate() {
            let (path, what) = self.name(i);
            let comma = if at == 0 { "" } else { ", " };
            let _ = write!(text, "{comma}{} {path} ({what})", crate::error::bytes_text(self.requests[i].bytes));
        }
        if then.len() > count {
            let rest: usize = then[count..].iter().map(|&i| self.requests[i].bytes).sum();
            let _ = write!(text, ", {} in {} more", crate::error::bytes_text(rest), then.len() - count);
        }
        text
    }

    /// One line per buffer, then the totals: the `memory` stage.
    pub fn text(&self) -> String {
        memory::print(&self.requests, &self.layout, &|i| match self.name(i) {
            (path, what) if i < self.buffers.len() => {
                let what = what.rsplit_once(' ').map_or(what.as_str(), |(id, _)| id).to_owned();
                format!("{what} {path}")
            }
            (_, what) => what,
        })
    }
}

pub(super) fn buffer_bytes(plan: &Plan, id: BufferId, bindings: &[i64]) -> Result<usize> {
    let buffer = &plan.buffers[id.index()];
    let elements = buffer.numel.eval(bindings)?;
    let elements = usize::try_from(elements)
        .map_err(|_| Error::invalid(format!("a buffer has {elements} elements at {bindings:?}")))?;
    let too_large = || Error::OutOfMemory { asked_bytes: usize::MAX, what: "one buffer".to_owned() };
    elements.checked_mul(buffer.dtype.size_bytes()).ok_or_else(too_large)
}
