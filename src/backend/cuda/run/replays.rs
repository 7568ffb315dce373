//! Graphs of a specialization: made at the second run, told new addresses from then on.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::NAME;
use super::super::driver::{CaptureStream, Graph, GraphLaunch, Node, StreamHandle};
use super::SpecializedCuda;
use super::call::Bound;
use super::item::Item;
use crate::{Error, Result};

/// The graph of a specialization for one stream, and what it was last told.
pub(super) struct Replay {
    pub(super) stream: StreamHandle,
    /// What libraries do is captured here, where there are any.
    pub(super) own: Option<CaptureStream>,
    pub(super) graph: Graph,
    pub(super) bases: Vec<u64>,
    /// Of each delegated item: whether the library runs.
    pub(super) delegated: Vec<bool>,
}

/// Most streams for which a specialization keeps a graph: each has a workspace of its own, and telling a graph of another
/// one is dearer than a second graph.
pub(super) const REPLAYS: usize = 4;

/// The graphs of a specialization, the one used last at the end.
#[derive(Default)]
pub(super) struct Replays {
    pub(super) runs: usize,
    pub(super) of: Vec<Replay>,
}

impl SpecializedCuda {
    /// As one graph, made at the second run; where there is none to be had, launch by launch from then on.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    pub(super) unsafe fn run_replayed(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        let lock = || self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        let mut replays = lock();
        replays.runs += 1;
        let mut refused = None;
        if replays.runs > 1 && self.no_graphs.get().is_none() {
            // SAFETY: the caller's promise.
            match unsafe { self.replay(&mut replays, bases, stream) } {
                Ok(()) => return Ok(()),
                Err(e) => refused = Some(e),
            }
        }
        drop(replays);
        // All of it is done again, should a graph have begun: a run reads arguments and writes results.
        // SAFETY: the caller's promise.
        unsafe { self.run_plain(bases, stream)? };
        // Had this failed too, it would not have been for the graph.
        if let Some(why) = refused {
            let _ = self.no_graphs.set(why.to_string());
            lock().of.clear();
            self.graph_bytes.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Launches the graph of a stream, made or renewed for these addresses.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn replay(&self, replays: &mut Replays, bases: &[u64], stream: StreamHandle) -> Result<()> {
        let delegated: Vec<bool> = self.items.iter().filter_map(Item::delegated).map(|d| d.is_on(bases)).collect();
        let (own, known) = match replays.of.iter().position(|r| r.stream == stream) {
            Some(at) => {
                let Replay { own, graph, bases, delegated: was, .. } = replays.of.remove(at);
                // Another choice between a library and kernels is another graph.
                (own, (was == delegated).then_some((graph, bases)))
            }
            None => {
                if replays.of.len() == REPLAYS {
                    drop(replays.of.remove(0));
                }
                let own = (!delegated.is_empty()).then(|| CaptureStream::new(&self.program.device));
                (own.transpose()?, None)
            }
        };
        let renewed = known.and_then(|(mut graph, told)| {
            // What a library does at other addresses may have another shape: then the graph is made anew.
            // SAFETY: the caller's promise; addresses are renewed before every run.
            unsafe { self.renew(&mut graph, &told, bases, own.as_ref()) }.ok().map(|()| graph)
        });
        let graph = match renewed {
            Some(graph) => graph,
            // SAFETY: as above.
            None => unsafe { self.graph(bases, own.as_ref(), stream)? },
        };
        // SAFETY: the caller's promise.
        unsafe { graph.launch(stream)? };
        replays.of.push(Replay { stream, own, graph, bases: bases.to_vec(), delegated });
        self.graph_bytes.store(replays.of.iter().map(|r| r.graph.bytes()).sum(), Ordering::Relaxed);
        Ok(())
    }

    /// The link of a graph that runs an item on these addresses.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`], for every run of the graph.
    unsafe fn link(&self, item: &Item, bases: &[u64], stream: Option<&CaptureStream>) -> Result<Node> {
        match (item, stream) {
            (Item::Kernel(call), _) => {
                let Bound { function, geometry, words } = call.bind(bases);
                Ok(Node::Kernel(GraphLaunch { function, geometry, args: words }))
            }
            // SAFETY: the caller's promise.
            (Item::Delegated(d), Some(stream)) => stream
                .capture(|stream| unsafe { d.record(bases, stream) })
                .map(Node::Captured)
                .map_err(|e| self.at_step(d.step, e)),
            (Item::Delegated(_), None) => Err(Error::Backend { backend: NAME, what: "no stream to capture on".into() }),
        }
    }

    /// A graph of everything.
    ///
    /// # Safety
    /// As [`SpecializedCuda::link`].
    unsafe fn graph(&self, bases: &[u64], stream: Option<&CaptureStream>, on: StreamHandle) -> Result<Graph> {
        // SAFETY: the caller's promise.
        let chain = self.items.iter().map(|item| unsafe { self.link(item, bases, stream) });
        let chain = chain.collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller's promise.
        unsafe { Graph::new(&self.program.device, chain, on) }
    }

    /// New addresses for the links that read others than a graph was `told`.
    ///
    /// # Safety
    /// As [`SpecializedCuda::link`].
    unsafe fn renew(
        &self,
        graph: &mut Graph,
        told: &[u64],
        bases: &[u64],
        stream: Option<&CaptureStream>,
    ) -> Result<()> {
        let changed: Vec<bool> = told.iter().zip(bases).map(|(a, b)| a != b).collect();
        if !changed.contains(&true) {
            return Ok(());
        }
        for (at, item) in self.items.iter().enumerate() {
            if item.reads(&changed) {
                // SAFETY: the caller's promise.
                unsafe { graph.update(at, self.link(item, bases, stream)?)? };
            }
        }
        Ok(())
    }
}
