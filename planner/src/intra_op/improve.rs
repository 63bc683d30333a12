//! Local search that never leaves what fits: the best change of a random tree at a time.
//!
//! A tree is grown from a random node so that each new node has one edge into it; with all
//! other nodes held, its best strategies follow from a dynamic program from the leaves to
//! the root. The program may price memory: without prices first, and if the result does not
//! fit, at rising prices. A change is made if it fits and does not cost more; changes that
//! cost the same are made too, because they lead elsewhere.
//!
//! Invariant: after every move the choice fits, and `cost` is its cost.

use super::dual::{Dual, INFINITE, Link};
use super::profile::Profile;
use super::reduced::Reduced;

/// SplitMix64 (Steele, Lea & Flood 2014).
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        // The bias is below n / 2^64.
        (self.next() % n.max(1) as u64) as usize
    }
}

/// A choice that fits, with what is needed to change it.
pub(super) struct Search<'a> {
    reduced: &'a Reduced,
    dual: &'a Dual<'a>,
    pub choice: Vec<u32>,
    profile: Profile,
    random: Random,
    /// Position in the tree that is being looked at; `u32::MAX` outside.
    position: Vec<u32>,
    tree: Vec<TreeNode>,
    frontier: Vec<u32>,
}

/// One node of the tree, parents before children.
struct TreeNode {
    node: u32,
    /// Position of the parent and the link to it.
    parent: Option<(u32, Link)>,
    /// Cost of each strategy with everything outside the tree held, without prices.
    costs: Vec<i64>,
    /// Costs with prices and the children's messages.
    sums: Vec<i64>,
    picked: u32,
}

impl<'a> Search<'a> {
    /// Starts from a choice that fits and picks nothing forbidden.
    pub fn new(
        reduced: &'a Reduced,
        dual: &'a Dual<'a>,
        choice: Vec<u32>,
        seed: u64,
    ) -> Search<'a> {
        let mut profile = Profile::new(&reduced.limits);
        for (node, &s) in reduced.nodes.iter().zip(&choice) {
            for term in &node.memory {
                profile.change(term.from, term.to, term.usage[s as usize] as i64);
            }
        }
        Search {
            reduced,
            dual,
            choice,
            profile,
            random: Random(seed),
            position: vec![u32::MAX; reduced.nodes.len()],
            tree: Vec::new(),
            frontier: Vec::new(),
        }
    }

    /// One move: a random tree of up to `size` nodes. Returns by how much the scaled cost fell.
    pub fn step(&mut self, size: usize) -> i64 {
        let root = self.random.below(self.reduced.nodes.len()) as u32;
        self.grow(root, size);
        self.hold_the_rest();
        let before = self.tree_cost(|search, t| search.choice[search.tree[t].node as usize]);
        let mut gain = 0;
        for weight in [0.0, 1.0, 4.0] {
            let after = self.best_picks(weight);
            if after >= before && weight == 0.0 {
                // Not even without memory is there anything better; make an equal change only.
                gain = if after == before && self.try_picks() {
                    0
                } else {
                    gain
                };
                break;
            }
            let after = self.tree_cost(|search, t| search.tree[t].picked);
            if after > before {
                break;
            }
            if self.try_picks() {
                gain = before - after;
                break;
            }
        }
        for t in &self.tree {
            self.position[t.node as usize] = u32::MAX;
        }
        gain
    }

    fn grow(&mut self, root: u32, size: usize) {
        self.tree.clear();
        self.frontier.clear();
        self.add(root, None);
        while self.tree.len() < size && !self.frontier.is_empty() {
            let k = self.random.below(self.frontier.len());
            let v = self.frontier.swap_remove(k);
            if self.position[v as usize] != u32::MAX {
                continue;
            }
            let mut inside = self.dual.links[v as usize]
                .iter()
                .filter(|l| self.position[l.other as usize] != u32::MAX);
            if let (Some(link), None) = (inside.next().copied(), inside.next()) {
                let parent = self.position[link.other as usize];
                self.add(v, Some((parent, link)));
            }
        }
    }

    fn add(&mut self, v: u32, parent: Option<(u32, Link)>) {
        self.position[v as usize] = self.tree.len() as u32;
        self.tree.push(TreeNode {
            node: v,
            parent,
            costs: Vec::new(),
            sums: Vec::new(),
            picked: 0,
        });
        let links = &self.dual.links[v as usize];
        self.frontier.extend(
            links
                .iter()
                .map(|l| l.other)
                .filter(|u| self.position[*u as usize] == u32::MAX),
        );
    }

    /// Node costs of the tree, the pairs with nodes outside included.
    fn hold_the_rest(&mut self) {
        for t in &mut self.tree {
            let v = t.node as usize;
            t.costs.clone_from(&self.dual.costs[v]);
            for link in &self.dual.links[v] {
                if self.position[link.other as usize] == u32::MAX {
                    let other = self.choice[link.other as usize] as usize;
                    add_pairs(self.reduced, self.dual, link, other, &mut t.costs);
                }
            }
        }
    }

    /// The tree's cost with a strategy for each of its nodes.
    fn tree_cost(&self, pick: impl Fn(&Self, usize) -> u32) -> i64 {
        let mut sum = 0;
        for (i, t) in self.tree.iter().enumerate() {
            let s = pick(self, i) as usize;
            sum += t.costs[s];
            if let Some((parent, link)) = &t.parent {
                sum += pair(
                    self.reduced,
                    self.dual,
                    link,
                    s,
                    pick(self, *parent as usize) as usize,
                );
            }
        }
        sum
    }

    /// Sets the picks that are best at `weight` times the prices; returns their priced cost.
    fn best_picks(&mut self, weight: f64) -> i64 {
        for t in &mut self.tree {
            t.sums.clone_from(&t.costs);
            if weight > 0.0 {
                let v = t.node as usize;
                let prices = self.dual.priced[v].iter().zip(&self.dual.costs[v]);
                for (x, (p, c)) in t.sums.iter_mut().zip(prices) {
                    *x = (*x + ((p - c) as f64 * weight) as i64).min(INFINITE);
                }
            }
        }
        for i in (1..self.tree.len()).rev() {
            let (above, below) = self.tree.split_at_mut(i);
            let child = &below[0];
            let (parent, link) = child.parent.as_ref().expect("only the root has no parent");
            let parent = &mut above[*parent as usize];
            add_message(self.reduced, self.dual, link, &child.sums, &mut parent.sums);
        }
        let root = &mut self.tree[0];
        root.picked = cheapest(&root.sums);
        let cost = root.sums[root.picked as usize];
        for i in 1..self.tree.len() {
            let (parent, link) = self.tree[i].parent.expect("only the root has no parent");
            let picked = self.tree[parent as usize].picked as usize;
            let child = &mut self.tree[i];
            add_pairs(self.reduced, self.dual, &link, picked, &mut child.sums);
            child.picked = cheapest(&child.sums);
        }
        cost
    }

    /// Takes the picks over if they fit.
    fn try_picks(&mut self) -> bool {
        self.swap_memory(false);
        if !self.profile.fits() {
            self.swap_memory(true);
            return false;
        }
        for t in &self.tree {
            self.choice[t.node as usize] = t.picked;
        }
        true
    }

    fn swap_memory(&mut self, back: bool) {
        for t in &self.tree {
            let old = self.choice[t.node as usize];
            if old == t.picked {
                continue;
            }
            let (from, to) = if back {
                (t.picked, old)
            } else {
                (old, t.picked)
            };
            for term in &self.reduced.nodes[t.node as usize].memory {
                let change = term.usage[to as usize] as i64 - term.usage[from as usize] as i64;
                self.profile.change(term.from, term.to, change);
            }
        }
    }
}

fn cheapest(sums: &[i64]) -> u32 {
    let best = (0..sums.len()).min_by_key(|&s| (sums[s], s));
    best.unwrap_or(0) as u32
}

fn pair(reduced: &Reduced, dual: &Dual<'_>, link: &Link, mine: usize, theirs: usize) -> i64 {
    let n_cols = reduced.edges[link.edge as usize].table.n_cols();
    let (row, col) = if link.rows {
        (mine, theirs)
    } else {
        (theirs, mine)
    };
    dual.tables[link.edge as usize][row * n_cols + col]
}

/// Adds the pair costs with strategy `theirs` at the link's other end.
fn add_pairs(reduced: &Reduced, dual: &Dual<'_>, link: &Link, theirs: usize, sums: &mut [i64]) {
    let n_cols = reduced.edges[link.edge as usize].table.n_cols();
    let table = &dual.tables[link.edge as usize];
    if link.rows {
        for (x, row) in sums.iter_mut().zip(table.chunks_exact(n_cols)) {
            *x = (*x + row[theirs]).min(INFINITE);
        }
    } else {
        for (x, cell) in sums.iter_mut().zip(&table[theirs * n_cols..][..n_cols]) {
            *x = (*x + cell).min(INFINITE);
        }
    }
}

/// Adds to each strategy of the parent the child's least sum beside it.
fn add_message(reduced: &Reduced, dual: &Dual<'_>, link: &Link, child: &[i64], parent: &mut [i64]) {
    let n_cols = reduced.edges[link.edge as usize].table.n_cols();
    let table = &dual.tables[link.edge as usize];
    if link.rows {
        // The child is at the rows.
        let mut least = vec![INFINITE; n_cols];
        for (row, &x) in table.chunks_exact(n_cols).zip(child) {
            for (l, &cell) in least.iter_mut().zip(row) {
                *l = (*l).min(cell.wrapping_add(x));
            }
        }
        parent
            .iter_mut()
            .zip(&least)
            .for_each(|(x, l)| *x = (*x + l).min(INFINITE));
    } else {
        for (x, row) in parent.iter_mut().zip(table.chunks_exact(n_cols)) {
            let sums = row
                .iter()
                .zip(child)
                .map(|(&cell, &c)| cell.wrapping_add(c));
            *x = (*x + sums.min().unwrap_or(INFINITE)).min(INFINITE);
        }
    }
}
