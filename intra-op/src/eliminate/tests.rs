use super::*;
use crate::improve::Random;

/// Makes a problem with few different rows: strategies show their neighbours one of three faces.
fn random(rng: &mut Random, largest: u64) -> (Vec<Vec<Cost>>, Vec<Edge>) {
    let n = 3 + rng.below(4);
    let cost = |rng: &mut Random| match rng.below(8) {
        0 => Cost::FORBIDDEN,
        _ => Cost::finite(rng.next() % largest),
    };
    let sizes: Vec<usize> = (0..n).map(|_| 1 + rng.below(12)).collect();
    let costs = sizes
        .iter()
        .map(|&size| (0..size).map(|_| cost(rng)).collect())
        .collect();
    let mut edges = Vec::new();
    for a in 0..n {
        for b in a + 1..n {
            if rng.below(3) > 0 {
                let faces: Vec<Cost> = (0..9).map(|_| cost(rng)).collect();
                let mut face =
                    |size: usize| -> Vec<usize> { (0..size).map(|_| rng.below(3)).collect() };
                let (of_a, of_b) = (face(sizes[a]), face(sizes[b]));
                let cell = |i: usize, j: usize| faces[3 * of_a[i] + of_b[j]];
                let table = Table::from_fn(sizes[a], sizes[b], cell);
                edges.push(Edge {
                    a: a as u32,
                    b: b as u32,
                    table: Arc::new(table),
                });
            }
        }
    }
    (costs, edges)
}

/// Eliminating with and without classes of strategies, in floats and in integers, gives the same
/// table and the same choice.
#[test]
fn classes_and_floats_change_nothing() {
    let mut rng = Random(1);
    let (mut narrower, mut in_floats) = (0, 0);
    for round in 0..200 {
        // Every other time beyond what floats hold.
        let largest = if round % 2 == 0 { 9 } else { 1 << 56 };
        let (costs, edges) = random(&mut rng, largest);
        let sizes: Vec<usize> = costs.iter().map(Vec::len).collect();
        let keep: Vec<u32> = vec![1, 0];
        let order = order::order(&sizes, &edges, &keep, u64::MAX).unwrap();
        let along = |worth| Eliminator::along(&sizes, &edges, &keep, &order, worth);
        let (apart, classes) = (along(u64::MAX), along(0));
        narrower += usize::from(classes.kept_cells() < apart.kept_cells());
        let (a, b) = (apart.run(&costs), classes.run(&costs));
        let floats = matches!(b.messages, Messages::Floats(_));
        assert!(floats || largest > 9);
        in_floats += usize::from(floats);
        let mut integers = a.clone();
        let messages = apart.messages(&a.costs, &apart.tables.costs);
        integers.messages = Messages::Integers(messages.unwrap());
        integers.table = integers.final_table();
        for other in [&b, &integers] {
            assert_eq!(a.table(), other.table());
            for i in 0..sizes[1] as u32 {
                for j in 0..sizes[0] as u32 {
                    assert_eq!(a.decode(&[i, j]), other.decode(&[i, j]));
                }
            }
        }
    }
    assert!(narrower > 100, "{narrower}");
    assert!((100..180).contains(&in_floats), "{in_floats}");
}

/// Makes two nodes of one strategy: `own` is the cost of the first, `shared` that of the edge.
fn pair(own: u64, shared: u64) -> (Vec<Vec<Cost>>, Vec<Edge>) {
    let table = Table::from_fn(1, 1, |_, _| Cost::finite(shared));
    let edge = Edge {
        a: 0,
        b: 1,
        table: Arc::new(table),
    };
    (
        vec![vec![Cost::finite(own)], vec![Cost::finite(0)]],
        vec![edge],
    )
}

#[test]
fn floats_are_used_only_where_sums_are_exact() {
    const LAST: u64 = (1 << 53) - 1;
    for (own, shared, in_floats) in [(LAST - 1, 1, true), (LAST, 1, false), (LAST + 1, 1, false)] {
        let (costs, edges) = pair(own, shared);
        let eliminator = Eliminator::new(&[1, 1], &edges, &[], u64::MAX).unwrap();
        let found = eliminator.run(&costs);
        assert_eq!(
            matches!(found.messages, Messages::Floats(_)),
            in_floats,
            "{own}"
        );
        // 2^53 + 1 is no float.
        assert_eq!(found.table(), [Cost::finite(own + shared)]);
    }
}

#[test]
fn sums_beyond_all_integers_are_forbidden() {
    let costs = vec![vec![Cost::finite(0); 2]; 17];
    let table = Arc::new(Table::from_fn(2, 2, |_, _| Cost::finite(1 << 60)));
    let edge = |b| Edge {
        a: 0,
        b,
        table: table.clone(),
    };
    let edges: Vec<Edge> = (1..17).map(edge).collect();
    let eliminator = Eliminator::new(&[2; 17], &edges, &[], u64::MAX).unwrap();
    assert_eq!(eliminator.run(&costs).table(), [Cost::FORBIDDEN]);
}

/// Up to its limit the table of what is near is that of all choices, with the same choices behind
/// it, and beyond it a bound.
#[test]
fn what_is_near_is_exact_and_the_rest_a_bound() {
    let mut rng = Random(3);
    let (mut n_exact, mut n_bounds, mut n_nothing) = (0, 0, 0);
    for round in 0..400 {
        let largest = [9, 1000, 1 << 40][round % 3];
        let (costs, edges) = random(&mut rng, largest);
        let sizes: Vec<usize> = costs.iter().map(Vec::len).collect();
        let eliminator = Eliminator::new(&sizes, &edges, &[1, 0], u64::MAX).unwrap();
        let all = eliminator.run(&costs);
        assert_eq!(all.exact_below(), None);
        for slack in [0.0, 0.1, 2.0] {
            let near = eliminator.narrowed(&costs, slack).unwrap();
            let below = near.exact_below().unwrap();
            let mut known = 0;
            for i in 0..sizes[1] as u32 {
                for j in 0..sizes[0] as u32 {
                    let (found, least) = (near.cost(&[i, j]), all.cost(&[i, j]));
                    let is_exact = found.value().is_some_and(|cost| cost < below);
                    match is_exact {
                        true => {
                            assert_eq!(found, least);
                            assert_eq!(near.decode(&[i, j]), all.decode(&[i, j]));
                            known += 1;
                        }
                        false => assert!(
                            found <= least && least.value() >= Some(below) || least.is_forbidden()
                        ),
                    }
                }
            }
            n_exact += known;
            n_bounds += sizes[0] * sizes[1] - known;
            n_nothing += usize::from(known == 0);
        }
    }
    assert!(n_exact > 4000 && n_bounds > 4000, "{n_exact} {n_bounds}");
    assert!(n_nothing < 800, "{n_nothing}");
}

/// Pairs that messages cannot take, and small eliminations, are left to the plain elimination.
#[test]
fn where_messages_do_not_reach_all_is_looked_at() {
    let (costs, edges) = pair(1, 2);
    let twice = [edges.clone(), edges.clone()].concat();
    let eliminator = |edges: &[Edge]| Eliminator::new(&[1, 1], edges, &[0], u64::MAX).unwrap();
    assert!(eliminator(&edges).narrowed(&costs, 0.1).is_some());
    assert!(eliminator(&twice).narrowed(&costs, 0.1).is_none());
    let below = |worth: u64| {
        eliminator(&edges)
            .run_near(&costs, 0.1, worth)
            .exact_below()
    };
    assert_eq!((below(WORTH_MESSAGES), below(0)), (None, Some(4)));
    let (large, _) = pair(1 << 60, 2);
    assert!(eliminator(&edges).narrowed(&large, 0.1).is_none());
}
