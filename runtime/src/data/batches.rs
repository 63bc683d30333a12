//! The batches of a run: which tokens a sample of a step or validation has.

use super::{DataError, Dataset, Order, Split};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Names the samples of one step or validation; each rank reads what it needs of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Batch {
    /// Those of a training step.
    Train {
        /// The step.
        step: u64,
    },
    /// A batch of the validation split, from its start again where there are too few windows.
    Validation {
        /// Which.
        index: u64,
    },
}

/// The source of all batches of a run.
#[derive(Debug)]
pub struct Batches {
    dataset: Arc<Dataset>,
    sequence: usize,
    global_batch: u64,
    order: Order,
    /// Windows for validation; without validation, none.
    validation: Option<u64>,
}

impl Batches {
    /// Batches of `global_batch` samples, the training ones in an order that the seed gives.
    ///
    /// Fails if a split has not a window, or no batch.
    pub fn new(
        dataset: Arc<Dataset>,
        (sequence, global_batch): (usize, u64),
        seed: u64,
        validates: bool,
    ) -> Result<Self, DataError> {
        let windows = dataset.n_windows(Split::Train, sequence)?;
        let validation = validates.then(|| dataset.n_windows(Split::Validation, sequence));
        Ok(Batches {
            order: Order::new(windows, global_batch, seed)?,
            validation: validation.transpose()?,
            dataset,
            sequence,
            global_batch,
        })
    }

    /// The data that they are read from.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Reads tokens of the sample at `position` of a batch, from its token `from` on.
    ///
    /// Fails as [`Dataset::read`] does.
    pub fn read(
        &self,
        batch: Batch,
        position: u64,
        from: u64,
        out: &mut [u32],
    ) -> Result<(), DataError> {
        let (split, window) = match batch {
            Batch::Train { step } => (Split::Train, self.order.window(step, position)),
            Batch::Validation { index } => {
                let windows = self.validation.unwrap_or(0).max(1);
                let window = (index * self.global_batch + position) % windows;
                (Split::Validation, window)
            }
        };
        self.dataset.read(split, window, self.sequence, from, out)
    }
}
