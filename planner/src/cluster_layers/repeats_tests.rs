use super::*;

/// Runs of a row of letters with one FLOP each, as (start, period, copies).
fn found(row: &str) -> Vec<(usize, usize, usize)> {
    let classes: Vec<usize> = row.bytes().map(usize::from).collect();
    let flops = vec![1; classes.len()];
    let tuple = |r: Run| (r.start, r.period, r.copies);
    runs(&classes, &flops).into_iter().map(tuple).collect()
}

#[test]
fn blocks_between_other_pieces() {
    assert_eq!(found("eamamamamhx"), [(1, 2, 4)]);
    assert_eq!(found("aaaa"), [(0, 1, 4)]);
    assert_eq!(found("abcdef"), []);
    assert_eq!(found(""), []);
    assert_eq!(found("a"), []);
}

#[test]
fn a_run_takes_what_does_not_fill_a_period_at_its_end() {
    // The first of the turns am.am.a and a.ma.ma.
    assert_eq!(found("eamamax"), [(1, 2, 2)]);
}

#[test]
fn the_shortest_period_and_several_runs() {
    assert_eq!(found("abababab"), [(0, 2, 4)]);
    // Two stacks with something between, as encoder and decoder.
    assert_eq!(found("xabababyccccz"), [(1, 2, 3), (8, 1, 4)]);
    assert_eq!(found("aabaabaab"), [(0, 3, 3)]);
}

#[test]
fn the_heavier_turn_is_taken() {
    let classes = [1, 2, 1, 2, 1];
    let tuple = |r: Run| (r.start, r.period, r.copies);
    let heavy_last = runs(&classes, &[1, 1, 1, 1, 9]);
    assert_eq!(
        heavy_last.into_iter().map(tuple).collect::<Vec<_>>(),
        [(1, 2, 2)]
    );
}

#[test]
fn what_costs_next_to_nothing_is_no_run() {
    let classes = [1, 1, 2];
    assert_eq!(runs(&classes, &[1, 1, 10_000]), []);
    assert_eq!(runs(&classes, &[0, 0, 0]), []);
    assert_eq!(runs(&classes, &[1, 1, 500]).len(), 1);
}

/// Every run that is found is one, and nothing is found twice.
#[test]
fn runs_repeat() {
    let mut seed = 7u64;
    for _ in 0..300 {
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let n = next(14) as usize;
        let classes: Vec<usize> = (0..n).map(|_| next(3) as usize).collect();
        let flops: Vec<u64> = (0..n).map(|_| next(4)).collect();
        let mut at = 0;
        for run in runs(&classes, &flops) {
            assert!(run.start >= at && run.copies > 1 && run.end() <= n);
            let range = run.start..run.end() - run.period;
            assert!(
                range
                    .into_iter()
                    .all(|i| classes[i] == classes[i + run.period])
            );
            at = run.end();
        }
    }
}
