//! A loss that leaps: far above what the steps before had. It may be a bad stretch of the data or the
//! beginning of a divergence; the run goes on and says so, once for as many steps as it looks back.

use std::collections::VecDeque;

/// Steps that a loss is compared with.
const BEFORE: usize = 20;
/// A leap is so many standard deviations above their mean, and by so large a share of it. Mean and
/// deviation are those of 20 losses themselves, so six deviations are Student's t of 5.7 with 19
/// degrees of freedom: of losses that vary normally and do not trend, some 8 in a million are so high by
/// chance. The share is for losses that hardly vary.
const LEAP: (f64, f64) = (6.0, 0.1);

/// Watches the losses of a run.
#[derive(Debug, Default)]
pub struct Leaps {
    before: VecDeque<f64>,
}

impl Leaps {
    /// Takes the loss of the next step. Says what the steps before had, least and most, where it leaps.
    pub fn see(&mut self, loss: f64) -> Option<[f64; 2]> {
        let found = self.leaps(loss);
        if found.is_some() {
            self.before.clear();
        }
        if self.before.len() == BEFORE {
            self.before.pop_front();
        }
        self.before.push_back(loss);
        found
    }

    fn leaps(&self, loss: f64) -> Option<[f64; 2]> {
        if self.before.len() < BEFORE {
            return None;
        }
        let n = BEFORE as f64;
        let mean = self.before.iter().sum::<f64>() / n;
        let squares = self.before.iter().map(|l| (l - mean) * (l - mean));
        let deviation = (squares.sum::<f64>() / n).sqrt();
        let above = loss - mean;
        let is_leap = above > LEAP.0 * deviation && above > LEAP.1 * mean.abs();
        let all = self.before.iter().copied();
        let [least, most] = [all.clone().fold(loss, f64::min), all.fold(mean, f64::max)];
        is_leap.then_some([least, most])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses that fall, with noise of some percent.
    fn usual(step: usize) -> f64 {
        5.0 / (1.0 + 0.002 * step as f64) + 0.2 * ((step * 7919 % 13) as f64 / 13.0)
    }

    #[test]
    fn noise_is_no_leap_and_a_leap_is_told_once() {
        let mut leaps = Leaps::default();
        assert!((0..2000).all(|step| leaps.see(usual(step)).is_none()));
        let told = (2000..2040).filter_map(|step| {
            let high = if step >= 2010 { 3.0 } else { 0.0 };
            leaps.see(usual(step) + high).map(|found| (step, found))
        });
        let told: Vec<(usize, [f64; 2])> = told.collect();
        let [(2010, [least, most])] = told[..] else {
            panic!("{told:?}")
        };
        assert!(least < most && most < 1.5, "{told:?}");
        // What is no number is found elsewhere, and is no leap.
        assert_eq!(leaps.see(f64::NAN), None);
    }
}
