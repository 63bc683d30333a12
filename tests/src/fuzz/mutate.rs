//! Spoiling good inputs: bytes anywhere, numbers and words of texts, nodes of JSON trees, and
//! the headers of safetensors files.

use ir::testing::Rng;
use serde_json::{Map, Value};

/// How the inputs of a target are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Bytes without more structure.
    Binary,
    /// Lines, words and numbers.
    Text,
    /// A JSON tree.
    Json,
    /// Eight bytes of length, a JSON header, data.
    Safetensors,
}

const WORDS: [&str; 24] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "64",
    "255",
    "256",
    "65536",
    "2147483647",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e-320",
    "0.5",
    "nan",
    "inf",
    "null",
    "B",
    "",
];

/// One spoiled input, made of one or two of the corpus.
pub(super) fn mutate(corpus: &[Vec<u8>], shape: Shape, rng: &mut Rng) -> Vec<u8> {
    let mut data = rng.pick(corpus);
    let rounds = rng.pick(&[1, 1, 1, 2, 2, 4, 8]);
    let structured = !rng.one_in(4);
    match shape {
        Shape::Json if structured => tree(&mut data, corpus, rounds, rng),
        Shape::Safetensors if structured => header(&mut data, rounds, rng),
        Shape::Text if structured => (0..rounds).for_each(|_| text(&mut data, corpus, rng)),
        _ => (0..rounds).for_each(|_| bytes(&mut data, corpus, rng)),
    }
    data
}

fn at(data: &[u8], rng: &mut Rng) -> usize {
    rng.below(data.len() as u64 + 1) as usize
}

fn span(data: &[u8], rng: &mut Rng) -> std::ops::Range<usize> {
    let start = at(data, rng);
    let longest = rng.pick(&[1, 2, 4, 8, 64, 4096]);
    start..(start + rng.between(1, longest) as usize).min(data.len())
}

fn bytes(data: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut Rng) {
    match rng.below(8) {
        0 => drop(data.drain(span(data, rng))),
        1 => {
            let part = data[span(data, rng)].to_vec();
            let to = at(data, rng);
            drop(data.splice(to..to, part));
        }
        2 => {
            let other = rng.pick(corpus);
            let (from, to) = (span(&other, rng), at(data, rng));
            drop(data.splice(to..to, other[from].to_vec()));
        }
        3 => data.truncate(at(data, rng)),
        4 => drop(data.splice(span(data, rng), rng.pick(&WORDS).bytes())),
        5 => {
            let to = at(data, rng);
            let value = rng
                .pick(&[0u64, 1, u64::MAX, 1 << 31, 1 << 32, i64::MAX as u64, 255])
                .to_le_bytes();
            let n = rng.pick(&[1, 2, 4, 8usize]).min(data.len() - to);
            data[to..to + n].copy_from_slice(&value[..n]);
        }
        _ => {
            let i = at(data, rng);
            if let Some(b) = data.get_mut(i) {
                *b = if rng.one_in(2) {
                    *b ^ (1 << rng.below(8))
                } else {
                    rng.next() as u8
                };
            }
        }
    }
}

/// Runs of characters of one kind: numbers, words, lines.
fn text(data: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut Rng) {
    let kind = rng.below(3);
    let inside = |b: u8| match kind {
        0 => b.is_ascii_digit() || b == b'.',
        1 => b.is_ascii_alphanumeric() || b"_.-%".contains(&b),
        _ => b != b'\n',
    };
    let run = |data: &[u8], rng: &mut Rng| -> Option<std::ops::Range<usize>> {
        let from = at(data, rng);
        let start = (from..data.len()).find(|&i| inside(data[i]))?;
        let end = (start..data.len())
            .find(|&i| !inside(data[i]))
            .unwrap_or(data.len());
        Some(start..end)
    };
    let Some(place) = run(data, rng) else {
        return bytes(data, corpus, rng);
    };
    let other = if rng.one_in(2) {
        data.clone()
    } else {
        rng.pick(corpus)
    };
    let with = match (rng.below(4), run(&other, rng)) {
        (0 | 1, Some(r)) => other[r].to_vec(),
        (2, _) if kind == 2 => Vec::new(),
        _ => rng.pick(&WORDS).bytes().collect(),
    };
    drop(data.splice(place, with));
}

fn header(data: &mut Vec<u8>, rounds: usize, rng: &mut Rng) {
    let Some((length, rest)) = data.split_first_chunk::<8>() else {
        return;
    };
    let n = (u64::from_le_bytes(*length) as usize).min(rest.len());
    let mut header = rest[..n].to_vec();
    let same = vec![header.clone()];
    tree(&mut header, &same, rounds, rng);
    *data = [
        &(header.len() as u64).to_le_bytes()[..],
        &header,
        &rest[n..],
    ]
    .concat();
}

fn tree(data: &mut Vec<u8>, corpus: &[Vec<u8>], rounds: usize, rng: &mut Rng) {
    let Ok(mut root) = serde_json::from_slice::<Value>(data) else {
        return bytes(data, corpus, rng);
    };
    let other: Value = serde_json::from_slice(&rng.pick(corpus)).unwrap_or(Value::Null);
    for _ in 0..rounds {
        let graft = node(&mut other.clone(), rng).clone();
        spoil(node(&mut root, rng), graft, rng);
    }
    *data = root.to_string().into_bytes();
}

/// A node of the tree; each child of a node is as likely as the other, deep ones more.
fn node<'a>(root: &'a mut Value, rng: &mut Rng) -> &'a mut Value {
    let children = match &*root {
        Value::Array(items) => items.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    } as u64;
    if children == 0 || rng.one_in(8) {
        return root;
    }
    let i = rng.below(children) as usize;
    let child = match root {
        Value::Array(items) => items.get_mut(i),
        Value::Object(map) => map.values_mut().nth(i),
        _ => None,
    };
    node(child.expect("below the number of children"), rng)
}

fn spoil(value: &mut Value, graft: Value, rng: &mut Rng) {
    let what = rng.below(8);
    match value {
        Value::Array(items) if what < 5 && !items.is_empty() => {
            let i = rng.below(items.len() as u64) as usize;
            match what {
                0 => drop(items.remove(i)),
                1 => items.insert(i, items[i].clone()),
                2 => items.insert(i, graft),
                3 => items.reverse(),
                _ => items.truncate(i),
            }
        }
        Value::Object(map) if what < 5 && !map.is_empty() => change_key(map, what, graft, rng),
        Value::Number(n) if what < 5 => {
            let old = n.as_f64().unwrap_or(0.0);
            *value = match what {
                0 => (old + 1.0).into(),
                1 => n
                    .as_u64()
                    .map_or((old * 2.0).into(), |k| k.saturating_add(1).into()),
                2 => n
                    .as_u64()
                    .map_or((-old).into(), |k| k.saturating_sub(1).into()),
                _ => number(rng),
            };
        }
        Value::String(s) if what < 5 && !s.is_empty() => {
            let mut bytes = s.clone().into_bytes();
            let same = vec![bytes.clone()];
            text(&mut bytes, &same, rng);
            *s = String::from_utf8_lossy(&bytes).into_owned();
        }
        _ => {
            *value = match what {
                5 => number(rng),
                6 => graft,
                7 => rng.pick(&[
                    Value::Null,
                    Value::Bool(true),
                    Value::Array(vec![]),
                    Value::Object(Map::new()),
                    Value::String(String::new()),
                ]),
                _ => Value::String(rng.pick(&WORDS).into()),
            }
        }
    }
}

fn change_key(map: &mut Map<String, Value>, what: u64, graft: Value, rng: &mut Rng) {
    let key = map
        .keys()
        .nth(rng.below(map.len() as u64) as usize)
        .cloned()
        .unwrap_or_default();
    let old = map.remove(&key).unwrap_or(Value::Null);
    match what {
        0 => {}
        1 => drop(map.insert(key + "x", old)),
        2 => drop(map.insert(key, graft)),
        3 => {
            map.insert(format!("{key}2"), old.clone());
            map.insert(key, old);
        }
        _ => {
            // Values of two keys change places.
            let other = map
                .keys()
                .nth(rng.below(map.len().max(1) as u64) as usize)
                .cloned();
            let swapped = other
                .and_then(|o| map.insert(o, old.clone()))
                .unwrap_or(old);
            map.insert(key, swapped);
        }
    }
}

fn number(rng: &mut Rng) -> Value {
    match rng.below(3) {
        0 => rng
            .pick(&[
                0u64,
                1,
                2,
                3,
                5,
                16,
                1000,
                u64::from(u32::MAX),
                1 << 32,
                i64::MAX as u64,
                u64::MAX,
            ])
            .into(),
        1 => rng.pick(&[-1.0, 0.5, 1e-300, 1e18, 1e308, -0.0]).into(),
        _ => rng.below(12).into(),
    }
}
