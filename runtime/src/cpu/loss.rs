//! Cross entropy over a vocabulary that may be sharded, and the squared norm.
//!
//! A shard of the logits is `[rows, width]` and holds the columns `vocab_offset ..
//! vocab_offset + valid` of the whole; the columns from `valid` on are padding, whatever they
//! hold. The loss of a row is `lse - logit[label]` with `lse = log(sum(exp(logit)))` over all
//! shards. The kernels compose over shards:
//!
//! - the `lse` of the whole is the [`combine_log_sum_exp`] of the shards' `lse`;
//! - the loss is the sum over shards of [`cross_entropy`] given the whole `lse`: one term each;
//! - the gradient of a shard needs nothing of the others but `lse`.
//!
//! A negative label is ignored: no loss, no gradient.

use super::special::exp;
use super::summation;
use super::wide::widest;

/// `log(sum(exp(logits[r, c])))` over the first `valid` columns: `(logits[rows, width]) ->
/// out[rows]`, negative infinity when there are none.
///
/// # Panics
/// If `valid` exceeds `width` or the slices do not have these shapes.
pub fn log_sum_exp(logits: &[f32], rows: usize, width: usize, valid: usize, out: &mut [f32]) {
    check_logits(logits, rows, width, valid);
    assert_eq!(out.len(), rows, "one result per row");
    widest(
        #[inline(always)]
        || {
            for (row, out) in out.iter_mut().enumerate() {
                *out = log_sum_exp_of(&logits[row * width..][..valid]);
            }
        },
    );
}

/// `log(sum(exp(part[i])))` over the parts, elementwise: the [`log_sum_exp`] of a row from those
/// of its shards. The order of the parts does not matter but for rounding.
///
/// # Panics
/// If a part is not as long as `out`.
pub fn combine_log_sum_exp(parts: &[&[f32]], out: &mut [f32]) {
    assert!(
        parts.iter().all(|part| part.len() == out.len()),
        "parts are like the result"
    );
    let mut terms = vec![0.0; parts.len()];
    for (row, out) in out.iter_mut().enumerate() {
        terms
            .iter_mut()
            .zip(parts)
            .for_each(|(term, part)| *term = part[row]);
        *out = log_sum_exp_of(&terms);
    }
}

/// Negative log-likelihood of each row's label, as far as this shard holds it:
/// `(logits[rows, width], lse[rows], labels[rows]) -> out[rows]`.
///
/// `out` is `lse - logit[label]` where the label is one of this shard's valid columns, and zero
/// elsewhere; the sum over shards is the loss of the whole.
///
/// # Panics
/// If `valid` exceeds `width` or the slices do not have these shapes.
pub fn cross_entropy(
    logits: &[f32],
    lse: &[f32],
    labels: &[i32],
    width: usize,
    vocab_offset: usize,
    valid: usize,
    out: &mut [f32],
) {
    check_logits(logits, labels.len(), width, valid);
    assert_eq!(
        [lse.len(), out.len()],
        [labels.len(); 2],
        "one element per row"
    );
    for (row, out) in out.iter_mut().enumerate() {
        let column = column_of(labels[row], vocab_offset, valid);
        *out = column.map_or(0.0, |column| lse[row] - logits[row * width + column]);
    }
}

/// Gradient of [`cross_entropy`], of `lse` as well:
/// `(logits[rows, width], lse[rows], labels[rows], dnll[rows]) -> out[rows, width]`.
///
/// `out` is `(exp(logit - lse) - onehot(label)) * dnll`, zero in the rows of ignored labels and
/// in padding columns. `lse` is that of the whole row.
///
/// # Panics
/// If `valid` exceeds `width` or the slices do not have these shapes.
#[allow(clippy::too_many_arguments)] // four operands, three numbers that name the shard
pub fn cross_entropy_grad(
    logits: &[f32],
    lse: &[f32],
    labels: &[i32],
    dnll: &[f32],
    width: usize,
    vocab_offset: usize,
    valid: usize,
    out: &mut [f32],
) {
    check_logits(logits, labels.len(), width, valid);
    assert_eq!(
        [lse.len(), dnll.len()],
        [labels.len(); 2],
        "one element per row"
    );
    assert_eq!(out.len(), logits.len(), "gradient is like the logits");
    for (row, &label) in labels.iter().enumerate() {
        let out = &mut out[row * width..][..width];
        if label < 0 {
            out.fill(0.0);
            continue;
        }
        let logits = &logits[row * width..][..valid];
        let column = column_of(label, vocab_offset, valid);
        gradient_row(logits, (lse[row], dnll[row]), column, out);
    }
}

/// [`cross_entropy_grad`] whose result takes the place of the logits.
///
/// # Panics
/// As [`cross_entropy_grad`].
pub fn cross_entropy_grad_over(
    logits: &mut [f32],
    lse: &[f32],
    labels: &[i32],
    dnll: &[f32],
    width: usize,
    vocab_offset: usize,
    valid: usize,
) {
    check_logits(logits, labels.len(), width, valid);
    assert_eq!(lse.len(), labels.len(), "one lse per row");
    assert_eq!(dnll.len(), labels.len(), "one gradient per row");
    let mut old = vec![0.0; width];
    for (row, logits) in logits.chunks_mut(width.max(1)).enumerate() {
        old.copy_from_slice(logits);
        let of = row..row + 1;
        cross_entropy_grad(
            &old,
            &lse[of.clone()],
            &labels[of.clone()],
            &dnll[of],
            width,
            vocab_offset,
            valid,
            logits,
        );
    }
}

/// The gradient of one row. `column` is that of its label.
fn gradient_row(logits: &[f32], (lse, dnll): (f32, f32), column: Option<usize>, out: &mut [f32]) {
    let (out, padding) = out.split_at_mut(logits.len());
    let (lse, dnll) = (f64::from(lse), f64::from(dnll));
    widest(
        #[inline(always)]
        || {
            for (out, &logit) in out.iter_mut().zip(logits) {
                *out = (exp(f64::from(logit) - lse) * dnll) as f32;
            }
        },
    );
    if let Some(column) = column {
        out[column] = ((exp(f64::from(logits[column]) - lse) - 1.0) * dnll) as f32;
    }
    padding.fill(0.0);
}

/// Sum of the squares of all elements, in `f64`.
pub fn sum_squares(x: &[f32]) -> f64 {
    widest(
        #[inline(always)]
        || summation::dot(x, x),
    )
}

/// Negative infinity for no terms; NaN if any is.
#[inline(always)]
fn log_sum_exp_of(terms: &[f32]) -> f32 {
    let largest = terms.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest.is_infinite() {
        // Subtracting it would make NaN of what is right already, unless a NaN hides below.
        return if terms.iter().any(|t| t.is_nan()) {
            f32::NAN
        } else {
            largest
        };
    }
    let largest = f64::from(largest);
    // `f32::max` skips NaN, the sum does not.
    (largest + summation::sum_by(terms, |t| exp(t - largest)).ln()) as f32
}

/// The shard's column of a label; none when it is ignored or another shard has it.
fn column_of(label: i32, vocab_offset: usize, valid: usize) -> Option<usize> {
    let column = usize::try_from(label).ok()?.checked_sub(vocab_offset)?;
    (column < valid).then_some(column)
}

fn check_logits(logits: &[f32], rows: usize, width: usize, valid: usize) {
    assert!(valid <= width, "{valid} valid columns of {width}");
    assert_eq!(logits.len(), rows * width, "logits of {rows} rows");
}

#[cfg(test)]
mod tests {
    use super::super::differences::numeric_gradient;
    use super::super::testing::{assert_close, bits, elements, random, reference, tensor};
    use super::*;

    fn lse_of(logits: &[f32], width: usize, valid: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; logits.len() / width];
        log_sum_exp(logits, out.len(), width, valid, &mut out);
        out
    }

    /// Loss of each row of unsharded logits.
    fn losses(logits: &[f32], labels: &[i32]) -> Vec<f32> {
        let width = logits.len() / labels.len();
        let mut out = vec![f32::NAN; labels.len()];
        let lse = lse_of(logits, width, width);
        cross_entropy(logits, &lse, labels, width, 0, width, &mut out);
        out
    }

    /// Gradient of `<dnll, losses>`.
    fn gradient(logits: &[f32], labels: &[i32], dnll: &[f32]) -> Vec<f32> {
        let width = logits.len() / labels.len();
        let mut out = vec![f32::NAN; logits.len()];
        let lse = lse_of(logits, width, width);
        cross_entropy_grad(logits, &lse, labels, dnll, width, 0, width, &mut out);
        out
    }

    #[test]
    fn a_gradient_over_the_logits_has_the_bits_of_one_beside_them() {
        let (labels, width, valid) = ([3, -1, 11, 0], 7, 5);
        let mut logits = random(1, labels.len() * width);
        // A row whose label is ignored is zero, whatever it held.
        logits[width] = f32::NAN;
        let (lse, dnll) = (lse_of(&logits, width, valid), random(2, labels.len()));
        let mut beside = vec![f32::NAN; logits.len()];
        cross_entropy_grad(&logits, &lse, &labels, &dnll, width, 3, valid, &mut beside);
        cross_entropy_grad_over(&mut logits, &lse, &labels, &dnll, width, 3, valid);
        assert_eq!(bits(&logits), bits(&beside));
        assert!(beside[0] != 0.0 && beside[width..2 * width].iter().all(|&g| g == 0.0));
    }

    #[test]
    fn cross_entropy_equals_pytorch_s() {
        for entry in reference("cross_entropy") {
            let (shape, _) = tensor(&entry["inputs"]["logits"]);
            let logits = elements(&entry["inputs"]["logits"]);
            let labels: Vec<i32> = tensor(&entry["inputs"]["labels"])
                .1
                .iter()
                .map(|&l| l as i32)
                .collect();
            // Absolute rounding of logits is larger where they are.
            let largest = logits.iter().fold(1.0, |a, b| f64::from(b.abs()).max(a));
            let tolerance = 2e-7 * largest;
            let output = |name: &str| tensor(&entry["outputs"][name]).1;
            assert_close(
                &lse_of(&logits, shape[1], shape[1]),
                &output("lse"),
                tolerance,
                "lse",
            );
            let token = losses(&logits, &labels);
            assert_close(&token, &output("token_loss"), tolerance, "token loss");
            let counted = entry["attrs"]["n_counted"].as_f64().expect("a number");
            let mean = summation::sum(&token) / counted;
            assert!(
                (mean - output("loss")[0]).abs() < tolerance,
                "mean loss {mean}"
            );
            let upstream = tensor(&entry["upstream"]["loss"]).1[0];
            let dnll = vec![(upstream / counted) as f32; labels.len()];
            let dlogits = gradient(&logits, &labels, &dnll);
            assert_close(
                &dlogits,
                &tensor(&entry["grads"]["logits"]).1,
                tolerance,
                "gradient",
            );
        }
    }

    #[test]
    fn gradient_equals_differences() {
        let (logits, dnll) = (random(1, 4 * 6), random(2, 4));
        let labels = [5, 0, -100, 2];
        let expected = numeric_gradient(&logits, &dnll, |x| losses(x, &labels));
        assert_close(
            &gradient(&logits, &labels, &dnll),
            &expected,
            1e-4,
            "gradient",
        );
    }

    #[test]
    fn shards_with_padding_equal_the_whole() {
        const ROWS: usize = 5;
        const VOCAB: usize = 11;
        // (offset, valid, width): uneven, padded, and one shard of padding alone.
        const SHARDS: [(usize, usize, usize); 4] = [(0, 4, 4), (4, 4, 5), (8, 3, 4), (11, 0, 4)];
        let logits: Vec<f32> = random(3, ROWS * VOCAB).iter().map(|x| 9.0 * x).collect();
        let (labels, dnll) = ([3, 4, -100, 10, 7], random(4, ROWS));
        let shard = |(offset, valid, width): (usize, usize, usize)| {
            let mut shard = vec![f32::NAN; ROWS * width];
            for (row, to) in logits
                .chunks_exact(VOCAB)
                .zip(shard.chunks_exact_mut(width))
            {
                to[..valid].copy_from_slice(&row[offset..][..valid]);
            }
            shard
        };
        let parts = SHARDS.map(|s| lse_of(&shard(s), s.2, s.1));
        assert_eq!(parts[3], [f32::NEG_INFINITY; ROWS]);
        let mut lse = vec![f32::NAN; ROWS];
        combine_log_sum_exp(&parts.each_ref().map(Vec::as_slice), &mut lse);
        let whole = lse_of(&logits, VOCAB, VOCAB)
            .into_iter()
            .map(f64::from)
            .collect::<Vec<_>>();
        assert_close(&lse, &whole, 1e-6, "lse");

        let (mut loss, mut grad) = (vec![0.0; ROWS], vec![f32::NAN; ROWS * VOCAB]);
        for s in SHARDS {
            let (offset, valid, width) = s;
            let x = shard(s);
            let (mut part, mut dx) = (vec![f32::NAN; ROWS], vec![f32::NAN; x.len()]);
            cross_entropy(&x, &lse, &labels, width, offset, valid, &mut part);
            cross_entropy_grad(&x, &lse, &labels, &dnll, width, offset, valid, &mut dx);
            loss.iter_mut()
                .zip(part)
                .for_each(|(loss, part)| *loss += part);
            for (dx, to) in dx.chunks_exact(width).zip(grad.chunks_exact_mut(VOCAB)) {
                to[offset..][..valid].copy_from_slice(&dx[..valid]);
                assert!(
                    dx[valid..].iter().all(|&d| d == 0.0),
                    "padding has no gradient"
                );
            }
        }
        let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect::<Vec<_>>();
        assert_close(&loss, &wide(losses(&logits, &labels)), 1e-6, "loss");
        assert_close(
            &grad,
            &wide(gradient(&logits, &labels, &dnll)),
            1e-6,
            "gradient",
        );
        assert_eq!(loss[2], 0.0);
    }

    #[test]
    fn large_and_bad_logits() {
        let inf = f32::INFINITY;
        assert_eq!(lse_of(&[3e38, 3e38, -3e38, -3e38], 2, 2), [3e38, -3e38]);
        assert_eq!(
            lse_of(&[-inf, 2.0, -inf, -inf, inf, 1.0], 2, 2),
            [2.0, -inf, inf]
        );
        assert!(
            lse_of(&[1.0, f32::NAN, -inf, f32::NAN, inf, f32::NAN], 2, 2)
                .iter()
                .all(|x| x.is_nan())
        );
        // One column: the loss is zero.
        assert_eq!(losses(&[77.0], &[0]), [0.0]);
        assert_eq!(gradient(&[77.0], &[0], &[1.0]), [0.0]);
    }

    #[test]
    fn a_row_does_not_depend_on_other_rows() {
        let (logits, dnll) = (random(5, 6 * 21), random(6, 6));
        let labels = [0, 20, 3, -1, 7, 7];
        let (loss, grad) = (losses(&logits, &labels), gradient(&logits, &labels, &dnll));
        for (row, logits) in logits.chunks_exact(21).enumerate() {
            let (label, dnll) = (&labels[row..=row], &dnll[row..=row]);
            assert_eq!(bits(&losses(logits, label)), bits(&loss[row..=row]));
            assert_eq!(
                bits(&gradient(logits, label, dnll)),
                bits(&grad[row * 21..][..21])
            );
        }
    }

    #[test]
    fn squares_add_up() {
        assert_eq!(
            sum_squares(&[3.0, -4.0, 1e20]),
            25.0 + f64::from(1e20f32).powi(2)
        );
        assert_eq!(sum_squares(&[]), 0.0);
        log_sum_exp(&[], 0, 7, 7, &mut []);
    }
}
