//! How presolve's reductions are undone: what each leaves behind for the way back.
//!
//! Reductions that only drop strategies, times or pairs leave nothing but the original index
//! of every strategy that is kept beside it; those that move costs change no choice. What is
//! left are the reductions that take a node out: each notes how the node follows from others.
//! Undone last first, a node's masters are always decided before it.

/// A node that takes one strategy.
#[derive(Clone, Debug)]
pub(in super::super) struct Fixed {
    pub node: u32,
    pub strategy: u32,
}

/// A node that takes `values[k]` where `on` takes `keys[k]` (ascending).
#[derive(Clone, Debug)]
pub(in super::super) struct Follows {
    pub node: u32,
    pub on: u32,
    pub keys: Vec<u32>,
    pub values: Vec<u32>,
}

/// A node that takes `values[k * n + l]` where `on[0]` takes `keys[0][k]` and `on[1]` takes
/// `keys[1][l]`, one of `n`.
#[derive(Clone, Debug)]
pub(in super::super) struct FollowsTwo {
    pub node: u32,
    pub on: [u32; 2],
    pub keys: [Vec<u32>; 2],
    pub values: Vec<u32>,
}

/// One step of the way back. All nodes and strategies are the original ones.
#[derive(Clone, Debug)]
pub(in super::super) enum Undo {
    Fixed(Fixed),
    Follows(Follows),
    FollowsTwo(FollowsTwo),
}

impl Undo {
    /// Decides the node in `full`, where all that it follows is decided.
    pub fn undo(&self, full: &mut [u32]) {
        match self {
            Undo::Fixed(Fixed { node, strategy }) => full[*node as usize] = *strategy,
            Undo::Follows(u) => {
                full[u.node as usize] = u.values[place(&u.keys, full[u.on as usize])];
            }
            Undo::FollowsTwo(u) => {
                let [a, b] = u.on.map(|v| full[v as usize]);
                let [keys_a, keys_b] = &u.keys;
                let cell = place(keys_a, a) * keys_b.len() + place(keys_b, b);
                full[u.node as usize] = u.values[cell];
            }
        }
    }
}

fn place(keys: &[u32], strategy: u32) -> usize {
    keys.binary_search(&strategy)
        .expect("a lifted strategy is one that was left when the step was made")
}
