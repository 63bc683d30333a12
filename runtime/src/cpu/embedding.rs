//! Rows of a vocabulary-sharded table by id, and the gradient for the table.
//!
//! A shard holds rows `vocab_offset .. vocab_offset + rows` of the table. Ids of other shards,
//! negative ones included, contribute nothing, so that the results of all shards sum to the
//! unsharded one exactly: all but one term of each sum are zero.

/// `out[i] = table[ids[i] - vocab_offset]`, zeros for ids of other shards:
/// `(table[rows, width], ids[n]) -> out[n, width]`.
///
/// # Panics
/// If the slices do not have these shapes.
pub fn gather(
    table: &[f32],
    rows: usize,
    width: usize,
    vocab_offset: usize,
    ids: &[i32],
    out: &mut [f32],
) {
    assert_eq!(table.len(), rows * width, "table of {rows} rows");
    assert_eq!(out.len(), ids.len() * width, "one row per id");
    if width == 0 {
        return;
    }
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
        match row_of(id, vocab_offset, rows) {
            Some(row) => out.copy_from_slice(&table[row * width..][..width]),
            None => out.fill(0.0),
        }
    }
}

/// `out[r]` is the sum of the `dy[i]` with `ids[i] - vocab_offset == r`, zero without any:
/// `(ids[n], dy[n, width]) -> out[rows, width]`.
///
/// Sums are taken in `f64`, in the order of the ids, and rounded once.
///
/// # Panics
/// If the slices do not have these shapes.
pub fn scatter_add(
    ids: &[i32],
    dy: &[f32],
    width: usize,
    vocab_offset: usize,
    rows: usize,
    out: &mut [f32],
) {
    assert_eq!(dy.len(), ids.len() * width, "one gradient row per id");
    assert_eq!(out.len(), rows * width, "gradient of {rows} rows");
    out.fill(0.0);
    // Gathering the positions of each row first needs one row of f64 sums instead of a table.
    let row = |(at, &id)| row_of(id, vocab_offset, rows).map(|row| (row, at));
    let mut uses: Vec<(usize, usize)> = ids.iter().enumerate().filter_map(row).collect();
    uses.sort_unstable();
    let mut sums = vec![0.0; width];
    for uses in uses.chunk_by(|a, b| a.0 == b.0) {
        sums.fill(0.0);
        for (_, at) in uses {
            super::summation::add_to(&mut sums, &dy[at * width..][..width]);
        }
        super::summation::round_to(&sums, &mut out[uses[0].0 * width..][..width]);
    }
}

/// The shard's row of an id; none when another shard has it.
fn row_of(id: i32, vocab_offset: usize, rows: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(vocab_offset)?;
    (row < rows).then_some(row)
}

#[cfg(test)]
mod tests {
    use super::super::testing::random;
    use super::*;

    const WIDTH: usize = 5;
    const VOCAB: usize = 11;
    const IDS: [i32; 9] = [3, 10, 0, 3, -100, 7, 3, 11, 0];

    fn shards() -> [(usize, usize); 4] {
        [(0, 4), (4, 4), (8, 3), (11, 0)]
    }

    #[test]
    fn shards_of_a_gather_add_up_to_its_definition() {
        let table = random(1, VOCAB * WIDTH);
        let mut sum = vec![0.0; IDS.len() * WIDTH];
        for (offset, rows) in shards() {
            let mut out = vec![f32::NAN; sum.len()];
            let shard = &table[offset * WIDTH..][..rows * WIDTH];
            gather(shard, rows, WIDTH, offset, &IDS, &mut out);
            sum.iter_mut().zip(out).for_each(|(sum, y)| *sum += y);
        }
        for (&id, row) in IDS.iter().zip(sum.chunks_exact(WIDTH)) {
            match id {
                0..=10 => assert_eq!(row, &table[id as usize * WIDTH..][..WIDTH], "id {id}"),
                _ => assert_eq!(row, [0.0; WIDTH], "id {id}"),
            }
        }
    }

    #[test]
    fn shards_of_a_table_gradient_are_its_rows() {
        let dy = random(2, IDS.len() * WIDTH);
        let mut whole = vec![f32::NAN; VOCAB * WIDTH];
        scatter_add(&IDS, &dy, WIDTH, 0, VOCAB, &mut whole);
        for (row, actual) in whole.chunks_exact(WIDTH).enumerate() {
            for (column, actual) in actual.iter().enumerate() {
                let uses = IDS.iter().enumerate().filter(|(_, id)| **id == row as i32);
                let sum: f64 = uses.map(|(at, _)| f64::from(dy[at * WIDTH + column])).sum();
                assert_eq!(*actual, sum as f32, "row {row}, column {column}");
            }
        }
        for (offset, rows) in shards() {
            let mut out = vec![f32::NAN; rows * WIDTH];
            scatter_add(&IDS, &dy, WIDTH, offset, rows, &mut out);
            assert_eq!(out, &whole[offset * WIDTH..][..rows * WIDTH]);
        }
    }

    #[test]
    fn table_gradient_is_the_transpose_of_the_gather() {
        // <dy, gather(table)> = <scatter_add(dy), table>, up to rounding.
        let (table, dy) = (random(3, VOCAB * WIDTH), random(4, IDS.len() * WIDTH));
        let (mut y, mut dtable) = (vec![0.0; dy.len()], vec![0.0; table.len()]);
        gather(&table, VOCAB, WIDTH, 0, &IDS, &mut y);
        scatter_add(&IDS, &dy, WIDTH, 0, VOCAB, &mut dtable);
        let dot = super::super::summation::dot;
        assert!((dot(&dy, &y) - dot(&dtable, &table)).abs() < 1e-6);
    }

    #[test]
    fn nothing_to_do() {
        gather(&[], 0, 3, 0, &[], &mut []);
        gather(&[], 7, 0, 0, &[1, 2], &mut []);
        let mut out = [f32::NAN; 6];
        scatter_add(&[], &[], 3, 0, 2, &mut out);
        assert_eq!(out, [0.0; 6]);
    }
}
