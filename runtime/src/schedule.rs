//! The learning rate as a function of the training step.
//!
//! ```text
//!   peak         ____ constant
//!            /'''  `.
//!           /        `.  cosine or linear
//!   min    /           `-------
//!          |    |       |
//!          0  warmup  total          step
//! ```
//!
//! Invariants of a [`LrSchedule`], kept by its constructor and by deserialisation:
//! `0 <= min <= peak`, both finite, `peak > 0`, and `warmup_steps <= total_steps`. So
//! [`LrSchedule::lr_at`] is defined for every step and within `0..=peak`.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;
use thiserror::Error;

/// Linear warmup to `peak`, then decay to `min` at `total_steps`.
///
/// Steps count from 0. Text form: `{"peak": 3e-4, "min": 3e-5, "warmup_steps": 100,
/// "total_steps": 1000, "decay": "cosine"}`; `min`, `warmup_steps` and `decay` may be left
/// out and are then 0, 0 and `"cosine"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct LrSchedule {
    peak: f64,
    min: f64,
    warmup_steps: u64,
    total_steps: u64,
    decay: Decay,
}

/// The way from the peak to the minimum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Stays at the peak for ever; `min` is not used.
    Constant,
    /// Half a cosine wave, `min + (peak - min) * (1 + cos(pi * t)) / 2`; Loshchilov & Hutter
    /// 2017, "SGDR", without restarts.
    #[default]
    Cosine,
    /// A straight line.
    Linear,
}

/// Why the numbers do not make a schedule.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ScheduleError {
    /// A learning rate is NaN, infinite or negative.
    #[error("{name} learning rate is {}; it must be a finite number, at least 0", ir::Figure(*value))]
    NotARate {
        /// `"peak"` or `"min"`.
        name: &'static str,
        /// The value given.
        value: f64,
    },
    /// Nothing would be learned.
    #[error("peak learning rate is 0; nothing would be learned")]
    ZeroPeak,
    /// The rate would rise during the decay.
    #[error("min learning rate {} is above the peak {}", ir::Figure(*min), ir::Figure(*peak))]
    MinAbovePeak {
        /// The minimum given.
        min: f64,
        /// The peak given.
        peak: f64,
    },
    /// The peak would never be reached.
    #[error("{warmup_steps} warmup steps do not fit into {total_steps} total steps")]
    WarmupTooLong {
        /// Warmup steps given.
        warmup_steps: u64,
        /// Total steps given.
        total_steps: u64,
    },
}

impl LrSchedule {
    /// A schedule that reaches `peak` at step `warmup_steps` and `min` at step `total_steps`.
    ///
    /// Fails if the module's invariants do not hold.
    pub fn new(
        peak: f64,
        min: f64,
        warmup_steps: u64,
        total_steps: u64,
        decay: Decay,
    ) -> Result<Self, ScheduleError> {
        for (name, value) in [("peak", peak), ("min", min)] {
            if !value.is_finite() || value < 0.0 {
                return Err(ScheduleError::NotARate { name, value });
            }
        }
        if peak == 0.0 {
            return Err(ScheduleError::ZeroPeak);
        }
        if min > peak {
            return Err(ScheduleError::MinAbovePeak { min, peak });
        }
        if warmup_steps > total_steps {
            return Err(ScheduleError::WarmupTooLong {
                warmup_steps,
                total_steps,
            });
        }
        Ok(LrSchedule {
            peak,
            min,
            warmup_steps,
            total_steps,
            decay,
        })
    }

    /// The same rate at every step.
    pub fn constant(lr: f64) -> Result<Self, ScheduleError> {
        LrSchedule::new(lr, 0.0, 0, 0, Decay::Constant)
    }

    /// The learning rate of `step`, counted from 0.
    ///
    /// Warmup, `step < warmup_steps`: `peak * (step + 1) / (warmup_steps + 1)`, so that the
    /// first step already learns and step `warmup_steps` is the first at the peak (as in
    /// nanoGPT). Decay then runs over `t = (step - warmup_steps) / (total_steps -
    /// warmup_steps)`; from `t = 1` on the rate is `min`.
    pub fn lr_at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            // In f64, where `+ 1` cannot overflow.
            return self.peak * ((step as f64 + 1.0) / (self.warmup_steps as f64 + 1.0));
        }
        if self.decay == Decay::Constant {
            return self.peak;
        }
        if step >= self.total_steps {
            return self.min;
        }
        let t = (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64;
        let share = match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => 0.5 * (1.0 + (PI * t).cos()),
            Decay::Linear => 1.0 - t,
        };
        // Rounding can lift the sum one ulp above the peak.
        (self.min + (self.peak - self.min) * share).min(self.peak)
    }

    /// The step from which on the rate is zero, where it decays to that.
    pub fn zero_from(&self) -> Option<u64> {
        let ends = self.decay != Decay::Constant && self.min == 0.0;
        ends.then_some(self.total_steps)
    }

    /// The highest rate.
    pub fn peak(&self) -> f64 {
        self.peak
    }

    /// The rate that the decay ends at.
    pub fn min(&self) -> f64 {
        self.min
    }

    /// Steps below the peak at the start.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps
    }

    /// The step at which the decay has ended.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// The shape of the decay.
    pub fn decay(&self) -> Decay {
        self.decay
    }
}

/// The text form, before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    peak: f64,
    #[serde(default)]
    min: f64,
    #[serde(default)]
    warmup_steps: u64,
    total_steps: u64,
    #[serde(default)]
    decay: Decay,
}

impl TryFrom<Fields> for LrSchedule {
    type Error = ScheduleError;

    fn try_from(f: Fields) -> Result<Self, ScheduleError> {
        LrSchedule::new(f.peak, f.min, f.warmup_steps, f.total_steps, f.decay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(decay: Decay) -> LrSchedule {
        LrSchedule::new(1.0, 0.1, 4, 14, decay).unwrap()
    }

    #[test]
    fn warmup_is_linear_and_reaches_the_peak_once() {
        let rates: Vec<f64> = (0..5)
            .map(|step| schedule(Decay::Linear).lr_at(step))
            .collect();
        assert_eq!(rates, [1.0 / 5.0, 2.0 / 5.0, 3.0 / 5.0, 4.0 / 5.0, 1.0]);
    }

    #[test]
    fn decays_go_from_the_peak_to_the_minimum() {
        let close =
            |actual: f64, expected: f64| assert!((actual - expected).abs() < 1e-12, "{actual}");
        // Half way, step 4 + 5, both are at the middle of 1 and 0.1.
        close(schedule(Decay::Linear).lr_at(9), 0.55);
        close(schedule(Decay::Cosine).lr_at(9), 0.55);
        // One tenth of the way: cos(18 degrees) = 0.951056516295.
        close(schedule(Decay::Linear).lr_at(5), 0.1 + 0.9 * 0.9);
        close(
            schedule(Decay::Cosine).lr_at(5),
            0.1 + 0.9 * (1.0 + 0.951_056_516_295_154) / 2.0,
        );
        close(schedule(Decay::Constant).lr_at(9), 1.0);
        for step in [14, 15, u64::MAX] {
            assert_eq!(schedule(Decay::Linear).lr_at(step), 0.1);
            assert_eq!(schedule(Decay::Cosine).lr_at(step), 0.1);
            assert_eq!(schedule(Decay::Constant).lr_at(step), 1.0);
        }
        assert_eq!(LrSchedule::constant(0.5).unwrap().lr_at(0), 0.5);
    }

    #[test]
    fn the_rate_is_zero_from_the_step_that_is_said() {
        let of = |min, total, decay| LrSchedule::new(1.0, min, 4, total, decay).unwrap();
        for decay in [Decay::Linear, Decay::Cosine] {
            let ends = of(0.0, 14, decay);
            assert_eq!(ends.zero_from(), Some(14));
            assert!(ends.lr_at(13) > 0.0 && ends.lr_at(14) == 0.0 && ends.lr_at(u64::MAX) == 0.0);
            assert_eq!(of(0.1, 14, decay).zero_from(), None);
            assert_eq!(of(0.0, u64::MAX, decay).zero_from(), Some(u64::MAX));
        }
        assert_eq!(of(0.0, 14, Decay::Constant).zero_from(), None);
    }

    #[test]
    fn impossible_numbers_are_refused_with_the_evidence() {
        let message = |peak, min, warmup, total| {
            LrSchedule::new(peak, min, warmup, total, Decay::Cosine)
                .unwrap_err()
                .to_string()
        };
        let finite = "it must be a finite number, at least 0";
        assert_eq!(
            message(f64::NAN, 0.0, 0, 1),
            format!("peak learning rate is NaN; {finite}")
        );
        assert_eq!(
            message(f64::INFINITY, 0.0, 0, 1),
            format!("peak learning rate is inf; {finite}")
        );
        assert_eq!(
            message(1.0, -0.5, 0, 1),
            format!("min learning rate is -0.5; {finite}")
        );
        assert_eq!(
            message(0.0, 0.0, 0, 1),
            "peak learning rate is 0; nothing would be learned"
        );
        assert_eq!(
            message(0.1, 0.2, 0, 1),
            "min learning rate 0.2 is above the peak 0.1"
        );
        assert_eq!(
            message(1.0, 0.0, 11, 10),
            "11 warmup steps do not fit into 10 total steps"
        );
    }

    #[test]
    fn text_form_round_trips_and_is_checked() {
        let text =
            r#"{"peak":0.0003,"min":0.00003,"warmup_steps":10,"total_steps":100,"decay":"linear"}"#;
        let parsed: LrSchedule = serde_json::from_str(text).unwrap();
        assert_eq!(
            serde_json::from_str::<LrSchedule>(&serde_json::to_string(&parsed).unwrap()).unwrap(),
            parsed
        );

        let short: LrSchedule = serde_json::from_str(r#"{"peak":1,"total_steps":10}"#).unwrap();
        assert_eq!(
            short,
            LrSchedule::new(1.0, 0.0, 0, 10, Decay::Cosine).unwrap()
        );

        for (bad, why) in [
            (
                r#"{"peak":1,"warmup_steps":11,"total_steps":10}"#,
                "11 warmup steps do not fit",
            ),
            (
                r#"{"peak":1,"total_steps":10,"warm_up":3}"#,
                "unknown field `warm_up`",
            ),
            (r#"{"peak":1,"total_steps":-1}"#, "invalid value"),
            (
                r#"{"peak":1,"total_steps":10,"decay":"step"}"#,
                "unknown variant `step`",
            ),
        ] {
            let error = serde_json::from_str::<LrSchedule>(bad)
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_numbers_are_refused_or_give_rates_in_range(
            peak: f64, min: f64, warmup: u64, total: u64, step: u64, shape in 0..3,
        ) {
            let decay = [Decay::Constant, Decay::Cosine, Decay::Linear][shape as usize];
            for (peak, min) in [(peak, min), (peak.abs(), 0.0)] {
                if let Ok(schedule) = LrSchedule::new(peak, min, warmup.min(total), total, decay) {
                    for step in [0, step, warmup, total, u64::MAX] {
                        let lr = schedule.lr_at(step);
                        prop_assert!((0.0..=peak).contains(&lr), "{lr} of {schedule:?}");
                    }
                }
            }
        }

        #[test]
        fn rates_fall_after_warmup(total in 1u64..1000, step in 0u64..1000) {
            for decay in [Decay::Constant, Decay::Cosine, Decay::Linear] {
                let schedule = LrSchedule::new(1e-3, 1e-5, 0, total, decay).unwrap();
                prop_assert!(schedule.lr_at(step + 1) <= schedule.lr_at(step));
            }
        }
    }
}
