//! Finds runs of equal layers.
//!
//! A *block* is a longest row of ops of one layer. A run is a row of blocks whose layers are
//! numbered up or down and whose ops are equal but for that number, their operands being
//! either in an arithmetic progression from block to block (values of the block itself,
//! values from before the run, values of another run), or, from the second block on, one
//! value of the block before. Runs are found greedily from the first block on.

use super::{HOLE, attributes};
use crate::{Graph, LayerId, Op, OpKind, ValueId};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// Names that differ in one number: prefix, number, suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Numbered {
    prefix: String,
    suffix: String,
    /// The first name's number.
    pub(super) from: u32,
    /// True when the numbers fall.
    pub(super) down: bool,
}

impl Numbered {
    /// The row that starts with these two names.
    pub(super) fn of(first: &str, second: &str) -> Option<Self> {
        let same = first
            .bytes()
            .zip(second.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        // The number starts before the first difference where `h.10` follows `h.9` or `h.11`.
        let is_digit = |b: &u8| b.is_ascii_digit();
        let start = same
            - first.as_bytes()[..same]
                .iter()
                .rev()
                .take_while(|b| is_digit(b))
                .count();
        let number = |name: &str| -> Option<(u32, String)> {
            if !name.is_char_boundary(start) {
                return None;
            }
            let len = name.as_bytes()[start..]
                .iter()
                .take_while(|b| is_digit(b))
                .count();
            let digits = &name[start..start + len];
            let n: u32 = digits.parse().ok()?;
            (n.to_string() == digits).then(|| (n, name[start + len..].to_string()))
        };
        let ((from, suffix), (next, suffix2)) = (number(first)?, number(second)?);
        let prefix = first[..start].to_string();
        let plain = !prefix.contains(HOLE) && !suffix.contains(HOLE);
        let down = from.checked_sub(1) == Some(next);
        let up = from.checked_add(1) == Some(next);
        (suffix == suffix2 && plain && (up || down)).then_some(Numbered {
            prefix,
            suffix,
            from,
            down,
        })
    }
    /// The number of copy `k`.
    pub(super) fn number(from: u32, down: bool, k: u64) -> Option<u32> {
        let k = u32::try_from(k).ok()?;
        if down {
            from.checked_sub(k)
        } else {
            from.checked_add(k)
        }
    }
    /// The names with a hole for the number.
    pub(super) fn template(&self) -> String {
        format!("{}{HOLE}{}", self.prefix, self.suffix)
    }
    fn name(&self, k: u64) -> Option<String> {
        let n = Self::number(self.from, self.down, k)?;
        Some(format!("{}{n}{}", self.prefix, self.suffix))
    }
    /// How many names from the first on are this row's.
    pub(super) fn count(&self, names: &[String]) -> usize {
        let fits = |(k, name): &(usize, &String)| self.name(*k as u64).as_ref() == Some(*name);
        names.iter().enumerate().take_while(fits).count()
    }
}

/// How an operand of the body is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    /// The value, with the default stride.
    Plain(ValueId),
    /// The value and its stride.
    Strided(ValueId, i64),
    /// The carried value of this index.
    Carried(usize),
}

/// A run of equal layers.
#[derive(Debug)]
pub(super) struct Run {
    /// Names of the layers.
    pub(super) names: Numbered,
    /// Number of layers.
    pub(super) n: usize,
    /// Ops of the first layer, by index.
    pub(super) body: Range<usize>,
    /// First and later values of what is carried; the later one as in the first copy.
    pub(super) carried: Vec<(ValueId, ValueId)>,
    /// Per op of the body: path, attributes and operands as written.
    pub(super) lines: Vec<Line>,
}

/// The parts of an op's line that the op itself does not hold.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) path: String,
    pub(super) attributes: Option<Value>,
    /// The operands, then the reference of the origin.
    pub(super) operands: Vec<Operand>,
}

/// The values that the text of an op names: its operands, and where its origin says that it was
/// made for an op, that op's first result.
pub(super) fn references<'g>(graph: &'g Graph, op: &'g Op) -> impl Iterator<Item = ValueId> + 'g {
    let of = op.origin.of().filter(|of| of.index() < graph.ops().len());
    let of = of.and_then(|of| graph.op(of).outputs.first());
    op.inputs.iter().chain(of).copied()
}

/// A part of the text.
#[derive(Debug)]
pub(super) enum Item {
    /// Ops on their own.
    Ops(Range<usize>),
    /// Equal layers.
    Run(Run),
}

/// Divides the graph into runs and other ops.
pub(super) fn items(graph: &Graph) -> Vec<Item> {
    let blocks = blocks(graph.ops());
    let layers = unique_layers(graph);
    let (mut items, mut i) = (Vec::new(), 0);
    while i < blocks.len() {
        match run(graph, &layers, &blocks[i..]) {
            Some(run) => {
                i += run.n;
                items.push(Item::Run(run));
            }
            None => {
                items.push(Item::Ops(blocks[i].clone()));
                i += 1;
            }
        }
    }
    items
}

fn blocks(ops: &[Op]) -> Vec<Range<usize>> {
    let mut start = 0;
    let rows = ops.chunk_by(|a, b| a.layer == b.layer);
    rows.map(|row| {
        start += row.len();
        start - row.len()..start
    })
    .collect()
}

/// Layers by name, without the names that two layers have.
fn unique_layers(graph: &Graph) -> BTreeMap<&str, LayerId> {
    let mut layers: BTreeMap<&str, Option<LayerId>> = BTreeMap::new();
    for (i, name) in graph.layers.iter().enumerate() {
        let id = LayerId::new(i);
        layers
            .entry(name)
            .and_modify(|l| *l = None)
            .or_insert(Some(id));
    }
    layers
        .into_iter()
        .filter_map(|(name, id)| Some((name, id?)))
        .collect()
}

/// The longest run that starts with the first of these blocks.
fn run(graph: &Graph, layers: &BTreeMap<&str, LayerId>, blocks: &[Range<usize>]) -> Option<Run> {
    let [first, second, ..] = blocks else {
        return None;
    };
    if first.len() != second.len() {
        return None;
    }
    let name = |block: &Range<usize>| graph.layers.get(graph.ops()[block.start].layer?.index());
    let names = Numbered::of(name(first)?, name(second)?)?;
    let mut fit = Fit::new(graph, names, first.clone())?;
    let belongs = |fit: &Fit, block: &Range<usize>, k: u64| {
        let layer = fit
            .names
            .name(k)
            .and_then(|name| layers.get(name.as_str()).copied());
        layer.is_some() && layer == graph.ops()[block.start].layer
    };
    if !belongs(&fit, first, 0) {
        return None;
    }
    let mut n = 1;
    for block in &blocks[1..] {
        if block.len() != first.len() || !belongs(&fit, block, n) || !fit.extend(block, n) {
            break;
        }
        n += 1;
    }
    (n > 1).then(|| fit.finish(n as usize))
}

/// The first block of a run, and what is still possible for each of its ops.
struct Fit<'a> {
    graph: &'a Graph,
    names: Numbered,
    body: Range<usize>,
    ops: Vec<OpFit>,
    /// Value index of the body's first result, and number of its results.
    base: i64,
    width: i64,
}

#[derive(Clone)]
struct OpFit {
    path: String,
    /// Attributes with holes, while they fit.
    template: Option<Value>,
    /// All attributes equal those of the first copy.
    literal: bool,
    operands: Vec<OperandFit>,
}

#[derive(Clone, Copy)]
struct OperandFit {
    first: i64,
    /// Known from the second copy on; `None` afterwards when it does not fit.
    stride: Option<i64>,
    /// The body's value that later copies read from the copy before, while it fits.
    carried: Option<i64>,
}

impl<'a> Fit<'a> {
    fn new(graph: &'a Graph, names: Numbered, body: Range<usize>) -> Option<Self> {
        let first = &graph.ops()[body.clone()];
        let results = || first.iter().flat_map(|op| &op.outputs);
        let base = i64::from(results().next()?.0);
        let width = results().count() as i64;
        let name = names.name(0)?;
        let ops = first
            .iter()
            .map(|op| OpFit::new(graph, op, &name, &names.template()))
            .collect::<Option<_>>()?;
        Some(Fit {
            graph,
            names,
            body,
            ops,
            base,
            width,
        })
    }
    /// True when copy `k` fits; then what is possible is narrowed to what fits it as well.
    fn extend(&mut self, block: &Range<usize>, k: u64) -> bool {
        let Some(number) = Numbered::number(self.names.from, self.names.down, k) else {
            return false;
        };
        let number = number.to_string();
        let graph = self.graph;
        let rows = graph.ops()[self.body.clone()]
            .iter()
            .zip(&graph.ops()[block.clone()]);
        let mut narrowed = Vec::with_capacity(self.ops.len());
        for (fit, (first, op)) in self.ops.iter().zip(rows) {
            match self.narrow(fit, first, op, k as i64, &number) {
                Some(fit) => narrowed.push(fit),
                None => return false,
            }
        }
        self.ops = narrowed;
        true
    }
    fn narrow(
        &self,
        fit: &OpFit,
        first: &'a Op,
        op: &'a Op,
        k: i64,
        number: &str,
    ) -> Option<OpFit> {
        let types = |op: &'a Op| op.outputs.iter().map(|&v| self.graph.ty(v));
        let same = first.pass == op.pass
            && first.region == op.region
            && first.origin.name() == op.origin.name()
            && fit.path.replace(HOLE, number) == op.path
            && first.inputs.len() == op.inputs.len()
            && types(first).eq(types(op));
        if !same {
            return None;
        }
        let mut next = fit.clone();
        next.literal = fit.literal && first.kind == op.kind;
        next.template = next.template.filter(|t| fills_to(t, &op.kind, number));
        for (o, v) in next.operands.iter_mut().zip(references(self.graph, op)) {
            *o = o.narrow(i64::from(v.0), k, self.base, self.width)?;
        }
        (next.literal || next.template.is_some()).then_some(next)
    }
    fn finish(self, n: usize) -> Run {
        let mut carried: Vec<(ValueId, ValueId)> = Vec::new();
        let lines = self.graph.ops()[self.body.clone()]
            .iter()
            .zip(&self.ops)
            .map(|(op, fit)| Line {
                path: fit.path.clone(),
                attributes: match fit.literal {
                    true => attributes::split(&op.kind).1,
                    false => fit.template.clone(),
                },
                operands: fit
                    .operands
                    .iter()
                    .map(|o| o.written(self.base, self.width, &mut carried))
                    .collect(),
            });
        let lines = lines.collect();
        Run {
            names: self.names,
            n,
            body: self.body,
            carried,
            lines,
        }
    }
}

fn fills_to(template: &Value, kind: &OpKind, number: &str) -> bool {
    let filled = attributes::map_strings(template, &|s| s.replace(HOLE, number));
    attributes::join(kind.name(), Some(&filled)).is_ok_and(|k| k == *kind)
}

impl OpFit {
    fn new(graph: &Graph, op: &Op, name: &str, template: &str) -> Option<Self> {
        let path = with_hole(&op.path, name, template)?;
        let (_, given) = attributes::split(&op.kind);
        if given
            .as_ref()
            .is_some_and(|a| attributes::any_string(a, &|s| s.contains(HOLE)))
        {
            return None;
        }
        let template = given.and_then(|a| {
            let named = attributes::any_string(&a, &|s| with_hole(s, name, template).is_some());
            let fill = |s: &str| with_hole(s, name, template).unwrap_or_else(|| s.to_string());
            named.then(|| attributes::map_strings(&a, &fill))
        });
        let operand = |v: ValueId| OperandFit {
            first: i64::from(v.0),
            stride: None,
            carried: None,
        };
        Some(OpFit {
            path,
            template,
            literal: true,
            operands: references(graph, op).map(operand).collect(),
        })
    }
}

impl OperandFit {
    fn narrow(self, v: i64, k: i64, base: i64, width: i64) -> Option<Self> {
        let mut next = self;
        if k == 1 {
            next.stride = Some(v - self.first);
            next.carried = Some(v).filter(|v| (base..base + width).contains(v));
        } else {
            next.stride = self.stride.filter(|s| v == self.first + k * s);
            next.carried = self.carried.filter(|c| v == c + (k - 1) * width);
        }
        (next.stride.is_some() || next.carried.is_some()).then_some(next)
    }
    fn written(self, base: i64, width: i64, carried: &mut Vec<(ValueId, ValueId)>) -> Operand {
        let id = |v: i64| ValueId::new(v as usize);
        let usual = if self.first < base { 0 } else { width };
        match (self.stride, self.carried) {
            (Some(stride), _) if stride == usual => Operand::Plain(id(self.first)),
            (_, Some(next)) => {
                let pair = (id(self.first), id(next));
                let known = carried.iter().position(|c| *c == pair);
                Operand::Carried(known.unwrap_or_else(|| {
                    carried.push(pair);
                    carried.len() - 1
                }))
            }
            (stride, None) => Operand::Strided(id(self.first), stride.unwrap_or(usual)),
        }
    }
}

/// The path with `template` for the layer's name, wherever that stands as whole components;
/// `None` where it does not.
fn with_hole(path: &str, name: &str, template: &str) -> Option<String> {
    let mut out = String::with_capacity(path.len() + HOLE.len());
    let (mut at, mut found) = (0, false);
    while let Some(i) = path[at..]
        .find(name)
        .map(|i| i + at)
        .filter(|_| !name.is_empty())
    {
        let end = i + name.len();
        let whole = (i == 0 || path.as_bytes()[i - 1] == b'.')
            && matches!(path.as_bytes().get(end), None | Some(b'.'));
        if whole {
            out += &path[at..i];
            out += template;
            (at, found) = (end, true);
        } else {
            let next = i + path[i..].chars().next().map_or(1, char::len_utf8);
            out += &path[at..next];
            at = next;
        }
    }
    out += &path[at..];
    found.then_some(out)
}
