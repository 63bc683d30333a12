//! The scan against the recurrence token by token in `f64`, and its gradient against differences.

use super::*;
use crate::cpu::differences::numeric_gradient;
use crate::cpu::testing::{assert_close, bits, random};

const S: Scan = Scan {
    samples: 2,
    tokens: 7,
    groups: 2,
    heads: 2,
    width: 3,
    state: 2,
    chunk: 3,
    dt_min: 0.4,
};

/// Operands in the order of the op.
fn operands() -> [Vec<f32>; 7] {
    let (rows, heads) = (14, 4);
    let lens = [rows * heads * 3, rows * heads, rows * 4, rows * 4, 4, 4, 4];
    let mut seed = 0;
    lens.map(|n| {
        seed += 1;
        random(seed, n)
    })
}

fn of(v: &[Vec<f32>; 7]) -> Operands<'_> {
    let [x, dt, b, c, a_log, d, dt_bias] = v;
    Operands {
        x,
        dt,
        b,
        c,
        a_log,
        d,
        dt_bias,
    }
}

/// Token by token.
fn recurrence(o: Operands<'_>, s: Scan) -> Vec<f64> {
    let (heads, n, p) = (s.groups * s.heads, s.state, s.width);
    let mut y = Vec::new();
    let mut states = vec![0.0; heads * n * p];
    for row in 0..s.samples * s.tokens {
        if row % s.tokens == 0 {
            states.fill(0.0);
        }
        for h in 0..heads {
            let g = row * s.groups + h / s.heads;
            let t = softplus(f64::from(o.dt[row * heads + h]) + f64::from(o.dt_bias[h]));
            let t = t.max(s.dt_min);
            let kept = (-f64::from(o.a_log[h]).exp() * t).exp();
            for k in 0..p {
                let x = f64::from(o.x[(row * heads + h) * p + k]);
                let mut sum = f64::from(o.d[h]) * x;
                for i in 0..n {
                    let state = &mut states[(h * n + i) * p + k];
                    *state = kept * *state + t * f64::from(o.b[g * n + i]) * x;
                    sum += *state * f64::from(o.c[g * n + i]);
                }
                y.push(sum);
            }
        }
    }
    y
}

fn run(v: &[Vec<f32>; 7], s: Scan, threads: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; v[0].len()];
    forward(of(v), s, threads, &mut y);
    y
}

fn gradients(v: &[Vec<f32>; 7], dy: &[f32], s: Scan, threads: usize) -> [Vec<f32>; 7] {
    let mut all = v.clone();
    all.iter_mut().for_each(|g| g.fill(f32::NAN));
    let [x, dt, b, c, a_log, d, dt_bias] = &mut all;
    let to = Gradients {
        x,
        dt,
        b,
        c,
        a_log,
        d,
        dt_bias,
    };
    backward(of(v), dy, s, threads, to);
    all
}

#[test]
fn chunks_give_the_recurrence() {
    let v = operands();
    let expected = recurrence(of(&v), S);
    for chunk in [1, 2, 3, 7, 100] {
        let s = Scan { chunk, ..S };
        assert_close(
            &run(&v, s, 1),
            &expected,
            2e-6,
            &format!("chunks of {chunk}"),
        );
        assert_eq!(bits(&run(&v, s, 3)), bits(&run(&v, s, 1)));
    }
}

#[test]
fn gradients_are_differences() {
    let v = operands();
    let dy = random(9, v[0].len());
    for chunk in [1, 3, 100] {
        let s = Scan { chunk, ..S };
        let found = gradients(&v, &dy, s, 1);
        for (i, found) in found.iter().enumerate() {
            // The least time step has a corner, where differences mean nothing.
            let s = Scan {
                dt_min: if i == 1 || i == 6 { 0.0 } else { S.dt_min },
                ..s
            };
            let found = match s.dt_min == S.dt_min {
                true => found.clone(),
                false => gradients(&v, &dy, s, 1)[i].clone(),
            };
            let expected = numeric_gradient(&v[i], &dy, |x| {
                let mut v = v.clone();
                v[i] = x.to_vec();
                run(&v, s, 1)
            });
            assert_close(
                &found,
                &expected,
                2e-4,
                &format!("operand {i}, chunks of {chunk}"),
            );
        }
        let shared = gradients(&v, &dy, s, 3);
        assert_eq!(
            found.each_ref().map(|g| bits(g)),
            shared.each_ref().map(|g| bits(g))
        );
    }
}

#[test]
fn a_step_at_its_least_has_no_gradient() {
    let mut v = operands();
    v[1].iter_mut().for_each(|dt| *dt -= 10.0);
    let dy = random(9, v[0].len());
    let found = gradients(&v, &dy, S, 1);
    assert!(found[1].iter().chain(&found[6]).all(|&g| g == 0.0));
    assert!(found[4].iter().all(|&g| g != 0.0));
}

#[test]
fn strong_decays_leave_finite_numbers() {
    let mut v = operands();
    v[4].fill(8.0);
    v[1].fill(50.0);
    let y = run(&v, S, 1);
    let found = gradients(&v, &y, S, 1);
    assert!(
        y.iter()
            .chain(found.iter().flatten())
            .all(|v| v.is_finite())
    );
}
