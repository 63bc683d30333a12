//! The stage table: what every range of layers costs on every submesh.

use std::ops::Range;

/// One way to run a range of layers on a submesh, for one microbatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageEntry {
    /// Forward time.
    pub forward_s: f64,
    /// Backward time, recomputation included.
    pub backward_s: f64,
    /// Time once per step: gradient synchronisation, optimizer.
    pub step_s: f64,
    /// Bytes per device that are always in use.
    pub static_bytes: u64,
    /// Bytes per device for every microbatch in flight.
    pub saved_bytes_per_microbatch: u64,
    /// Bytes per device for a moment.
    pub transient_bytes: u64,
    /// Bytes that a device has.
    pub capacity_bytes: u64,
    /// Sharding spec of what comes in; an index of the caller's.
    pub boundary_in: u16,
    /// Sharding spec of what goes out.
    pub boundary_out: u16,
    /// The caller's name for this entry.
    pub tag: u64,
}

impl StageEntry {
    /// Forward and backward.
    pub fn time_s(&self) -> f64 {
        self.forward_s + self.backward_s
    }

    /// Bytes per device with this many microbatches in flight.
    pub fn bytes(&self, in_flight: u64) -> u128 {
        let fixed = u128::from(self.static_bytes) + u128::from(self.transient_bytes);
        fixed + u128::from(in_flight) * u128::from(self.saved_bytes_per_microbatch)
    }

    pub(super) fn fits(&self, in_flight: u64) -> bool {
        self.bytes(in_flight) <= u128::from(self.capacity_bytes)
    }
}

/// The costs of every range of layers on every submesh: for each, a small Pareto list.
#[derive(Clone, Debug, PartialEq)]
pub struct StageTable {
    pub(super) n_layers: usize,
    pub(super) n_devices: usize,
    pub(super) submeshes: Vec<usize>,
    /// By submesh shape: the devices with which one may begin, ascending; empty for any.
    starts: Vec<Vec<usize>>,
    pub(super) entries: Vec<Vec<StageEntry>>,
}

impl StageTable {
    /// An empty table; `submeshes[s]` is the number of devices of submesh shape `s`.
    pub fn new(n_layers: usize, n_devices: usize, submeshes: Vec<usize>) -> StageTable {
        let cells = (n_layers + 1) * (n_layers + 1) * submeshes.len();
        StageTable {
            n_layers,
            n_devices,
            starts: vec![Vec::new(); submeshes.len()],
            submeshes,
            entries: vec![Vec::new(); cells],
        }
    }

    /// The same where submeshes of shape `s` lie only where `starts[s]` says: at one of these
    /// first devices, ascending, or anywhere if there are none. Plans then use all devices.
    pub fn at(self, starts: Vec<Vec<usize>>) -> StageTable {
        assert_eq!(
            starts.len(),
            self.submeshes.len(),
            "one list of each submesh"
        );
        StageTable { starts, ..self }
    }

    /// Whether a submesh may begin with device `first`.
    pub(super) fn lies(&self, submesh: usize, first: usize) -> bool {
        let starts = &self.starts[submesh];
        starts.is_empty() || starts.binary_search(&first).is_ok()
    }

    /// Layers of the model.
    pub fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Devices of the cluster.
    pub fn n_devices(&self) -> usize {
        self.n_devices
    }

    /// Devices per submesh shape.
    pub fn submeshes(&self) -> &[usize] {
        &self.submeshes
    }

    /// Adds a way to run `layers` on `submesh`.
    ///
    /// # Panics
    /// If the range is empty or out of bounds, the submesh does not exist, or a time is not a
    /// non-negative number.
    pub fn push(&mut self, layers: Range<usize>, submesh: usize, entry: StageEntry) {
        assert!(
            layers.start < layers.end && layers.end <= self.n_layers,
            "a range of layers"
        );
        assert!(submesh < self.submeshes.len(), "a submesh of this table");
        let times = [entry.forward_s, entry.backward_s, entry.step_s];
        assert!(
            times.iter().all(|t| t.is_finite() && *t >= 0.0),
            "times are not negative"
        );
        let cell = self.cell(layers.start, layers.end, submesh);
        self.entries[cell].push(entry);
    }

    /// The ways to run `layers` on `submesh`.
    pub fn get(&self, layers: Range<usize>, submesh: usize) -> &[StageEntry] {
        &self.entries[self.cell(layers.start, layers.end, submesh)]
    }

    fn cell(&self, start: usize, end: usize, submesh: usize) -> usize {
        (start * (self.n_layers + 1) + end) * self.submeshes.len() + submesh
    }
}
