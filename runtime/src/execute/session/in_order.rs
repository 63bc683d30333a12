//! States that are read one after the other, in an order that is known before.

use super::{ON_THE_WAY, Session, StateTensor};
use crate::error::RuntimeError;
use ir::program::StateBuffer;
use std::collections::{BTreeMap, VecDeque};

/// Reads states in an order that is known: with each one that is not there yet those that come next
/// are asked for, as many as are [on the way](ON_THE_WAY) at once. So far hosts are not waited for
/// once for each of them, and no more is in this process' memory, or the largest state where that
/// is more.
pub struct InOrder<'a> {
    session: &'a mut Session,
    places: BTreeMap<String, Vec<(usize, StateBuffer)>>,
    coming: VecDeque<String>,
    here: BTreeMap<String, StateTensor>,
}

impl Session {
    /// Begins to read states in this order.
    pub fn in_order(&mut self, paths: impl IntoIterator<Item = String>) -> InOrder<'_> {
        InOrder {
            places: self.state_places(),
            coming: paths.into_iter().collect(),
            here: BTreeMap::new(),
            session: self,
        }
    }
}

impl InOrder<'_> {
    /// A state as a full tensor; none if there is no state of this path. One that is out of order
    /// is asked for by itself.
    pub fn state(&mut self, path: &str) -> Result<Option<StateTensor>, RuntimeError> {
        if let Some(full) = self.here.remove(path) {
            return Ok(Some(full));
        }
        let Some(place) = self.places.get(path).and_then(|p| p.first()) else {
            return Ok(None);
        };
        let bytes = |(role, state): &(usize, StateBuffer)| {
            let lens = &self.session.program.roles[*role].buffer(state.buffer).lens;
            4 * lens.iter().product::<u64>() as usize
        };
        let (mut on_the_way, mut wanted) = (bytes(place), vec![(path.to_string(), place)]);
        if self.coming.front().is_some_and(|next| next == path) {
            self.coming.pop_front();
            while let Some(next) = self.coming.front() {
                // Of one that there is not its reader hears when it asks.
                if let Some(place) = self.places.get(next).and_then(|p| p.first()) {
                    on_the_way += bytes(place);
                    if on_the_way > ON_THE_WAY {
                        break;
                    }
                    wanted.push((next.clone(), place));
                }
                self.coming.pop_front();
            }
        }
        let places: Vec<_> = wanted.iter().map(|(_, place)| *place).collect();
        let full = self.session.gather_states(&places)?;
        let paths = wanted.into_iter().map(|(path, _)| path);
        self.here.extend(paths.zip(full));
        Ok(self.here.remove(path))
    }
}
