//! The calls of the instructions that a slot plays.
//!
//! The program says which neighbours may be one [`Call`]; a slot of a validation plays some of a
//! template's instructions only, and neighbours are what stands side by side in it. A device that
//! knows how makes one launch of them.

use ir::program::{Call, Instruction};

/// The calls of a slot.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Calls {
    /// The number of instructions of the chain that begins with each of those that the slot plays: 1
    /// of one that is alone, 0 of one that belongs to an earlier one. A device may make one call of
    /// the first few of them, too.
    pub n_chained: Vec<usize>,
    /// Whether its result is written though the next one of its chain takes it.
    pub is_kept: Vec<bool>,
    /// The number of instructions that are joined, likewise.
    pub n_joined: Vec<usize>,
}

impl Calls {
    /// The calls of the instructions that a slot plays, which are given by place in its template.
    pub fn of(instructions: &[Instruction], played: &[usize]) -> Self {
        let n = played.len();
        let mut made = Calls {
            n_chained: vec![1; n],
            is_kept: vec![true; n],
            n_joined: vec![1; n],
        };
        // The first of the chain, and of those that are joined, that the last one belongs to.
        let (mut chain, mut joint) = (0, 0);
        for k in 0..n {
            let call = |i: usize| instructions.get(i).map_or(Call::Own, |i| i.call);
            let before = k.checked_sub(1).and_then(|b| played.get(b)).copied();
            let i = played[k];
            match call(i) {
                Call::Chained { is_kept } if before.is_some_and(|b| b + 1 == i) => {
                    made.is_kept[k - 1] = is_kept;
                    made.n_chained[chain] += 1;
                    made.n_chained[k] = 0;
                }
                _ => chain = k,
            }
            // Of those that are joined some may be left out.
            let is_joined = |b: usize| (b + 1..=i).all(|i| call(i) == Call::Joined);
            match before.is_some_and(is_joined) {
                true => {
                    made.n_joined[joint] += 1;
                    made.n_joined[k] = 0;
                }
                false => joint = k,
            }
        }
        made.part_broken(instructions, played);
        made
    }
    /// Plays chains one by one of which an instruction is left out before one that is played: that one
    /// may take any value before it.
    fn part_broken(&mut self, instructions: &[Instruction], played: &[usize]) {
        for k in 0..played.len() {
            let n = self.n_chained[k];
            let Some(behind) = played.get(k + n).filter(|_| n > 1) else {
                continue;
            };
            let is_chained = |i: &Instruction| matches!(i.call, Call::Chained { .. });
            let between = instructions.get(played[k + n - 1] + 1..=*behind);
            if between.is_some_and(|all| all.iter().all(is_chained)) {
                self.n_chained[k..k + n].fill(1);
                self.is_kept[k..k + n].fill(true);
            }
        }
    }
    /// Those of a whole template.
    pub fn of_all(instructions: &[Instruction]) -> Self {
        let every: Vec<usize> = (0..instructions.len()).collect();
        Calls::of(instructions, &every)
    }
}

#[cfg(test)]
pub(super) mod tests;
