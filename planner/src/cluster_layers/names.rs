//! Names for layers that were found: the scope that their ops share.
//!
//! A plan writes a layer's name as `{}` in the paths of its strategies, and layers whose
//! paths are equal then share a strategy: with blocks called `h.0.*`, `h.1.*`, .. the names
//! `h.0`, `h.1`, .. do that. Where paths allow no such names the plan has a strategy for each
//! layer and is longer, not different.

use ir::{Graph, OpId, OpKind};
use std::collections::{BTreeMap, BTreeSet};

/// A name for each layer, all different.
///
/// The scope that its ops share, inputs and ops without a scope left aside. Where several
/// layers have the same, what follows it in the first and the last op (`h.4-7` for blocks 4
/// to 7 of `h`); where that is no name either, `layer.<number>`.
pub(super) fn names(graph: &Graph, layers: &[Vec<OpId>]) -> Vec<String> {
    let scopes: Vec<Vec<&str>> = layers.iter().map(|ops| scope(graph, ops)).collect();
    let short: Vec<String> = scopes.iter().map(|s| s.join(".")).collect();
    let long: Vec<String> = layers
        .iter()
        .zip(&scopes)
        .map(|(ops, scope)| span(graph, ops, scope))
        .collect();
    let (once_short, once_long) = (once(&short), once(&long));
    let mut taken: BTreeSet<String> = BTreeSet::new();
    (0..layers.len())
        .map(|i| {
            let candidates = [
                Some(&short[i]).filter(|s| once_short.contains(*s)),
                Some(&long[i]).filter(|s| once_long.contains(*s)),
            ];
            let free = candidates
                .into_iter()
                .flatten()
                .find(|s| !s.is_empty() && !taken.contains(*s));
            let mut name = free.cloned().unwrap_or_else(|| format!("layer.{i}"));
            while taken.contains(&name) {
                name.push('x');
            }
            taken.insert(name.clone());
            name
        })
        .collect()
}

/// The texts that stand there once.
fn once(texts: &[String]) -> BTreeSet<&String> {
    let mut counts: BTreeMap<&String, usize> = BTreeMap::new();
    for text in texts {
        *counts.entry(text).or_default() += 1;
    }
    counts
        .into_iter()
        .filter_map(|(text, n)| (n == 1).then_some(text))
        .collect()
}

/// The components of an op's path.
fn components(graph: &Graph, id: OpId) -> Vec<&str> {
    graph.op(id).path.split('.').collect()
}

/// The scopes of a layer's ops that have one: their paths without the last component.
fn scopes<'g>(graph: &'g Graph, ops: &'g [OpId]) -> impl DoubleEndedIterator<Item = Vec<&'g str>> {
    let named = ops
        .iter()
        .filter(|&&id| !matches!(graph.op(id).kind, OpKind::Input { .. }));
    named.filter_map(|&id| {
        let mut scope = components(graph, id);
        scope.pop();
        (!scope.is_empty()).then_some(scope)
    })
}

/// The longest scope that contains the ops of a layer.
fn scope<'g>(graph: &'g Graph, ops: &'g [OpId]) -> Vec<&'g str> {
    let common = |a: Vec<&'g str>, b: Vec<&'g str>| {
        let n = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        a[..n].to_vec()
    };
    scopes(graph, ops).reduce(common).unwrap_or_default()
}

/// The scope with what follows it in the first and in the last op.
fn span(graph: &Graph, ops: &[OpId], scope: &[&str]) -> String {
    let next = |path: Vec<&str>| path.get(scope.len()).map(|s| s.to_string());
    let first = scopes(graph, ops).find_map(next);
    let last = scopes(graph, ops).rev().find_map(next);
    let tail = match (first, last) {
        (Some(a), Some(b)) if a != b => format!("{a}-{b}"),
        (Some(a), _) => a,
        _ => return String::new(),
    };
    scope
        .iter()
        .copied()
        .chain([tail.as_str()])
        .collect::<Vec<_>>()
        .join(".")
}
