//! The file form of an intra-op problem: the JSON of the IOPDDL benchmark
//! (ASPLOS 2025 / EuroSys 2025 contest, repository google/iopddl), plain or gzip.
//!
//! Costs of 10^18 or more mean "forbidden" in this form and nowhere else. Files are read as a
//! stream, equal edge tables are kept once, and what is malformed is refused with the place.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::Arc;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::IntraOpError;
use super::problem::{Cost, Edge, IntraOpProblem, Node, Table};

/// The least cost that means forbidden in files.
pub const FORBIDDEN_IN_FILES: u64 = 1_000_000_000_000_000_000;

/// Reads a problem from JSON, or from gzip-compressed JSON (told by its first two bytes).
///
/// # Errors
/// [`IntraOpError::Read`] when the input cannot be read or is not JSON of the right form
/// (with the place, line and column), [`IntraOpError::Malformed`] when its parts disagree.
pub fn read_problem(input: impl Read) -> Result<IntraOpProblem, IntraOpError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let head = input.fill_buf().map_err(IntraOpError::read)?;
    if head.starts_with(&[0x1f, 0x8b]) {
        let unzipped = flate2::bufread::MultiGzDecoder::new(input);
        read_json(BufReader::with_capacity(1 << 16, unzipped))
    } else {
        read_json(input)
    }
}

/// Reads a solution: a JSON list with one strategy index per node.
///
/// # Errors
/// [`IntraOpError::Read`] when the input is not such a list.
pub fn read_solution(input: impl Read) -> Result<Vec<u32>, IntraOpError> {
    serde_json::from_reader(BufReader::new(input)).map_err(IntraOpError::read)
}

/// Writes a solution as a JSON list on one line.
///
/// # Errors
/// [`IntraOpError::Write`] when `out` fails.
pub fn write_solution(choice: &[u32], mut out: impl Write) -> Result<(), IntraOpError> {
    serde_json::to_writer(&mut out, choice).map_err(IntraOpError::write)?;
    writeln!(out).map_err(IntraOpError::write)
}

/// Writes a problem in the benchmark's form, forbidden as 10^18.
///
/// # Errors
/// [`IntraOpError::Write`] when `out` fails, or when a finite cost is 10^18 or more, which
/// this form cannot say.
pub fn write_problem(problem: &IntraOpProblem, mut out: impl Write) -> Result<(), IntraOpError> {
    let out = &mut out;
    let name = serde_json::to_string(&problem.name).map_err(IntraOpError::write)?;
    emit(
        out,
        &format!("{{\"problem\":{{\"name\":{name},\"nodes\":{{\"intervals\":["),
    )?;
    emit_list(out, &problem.nodes, |out, node| {
        let [from, to] = node.interval;
        emit(out, &format!("[{from},{to}]"))
    })?;
    emit(out, "],\"costs\":[")?;
    emit_list(out, &problem.nodes, |out, node| {
        emit_costs(out, &node.costs)
    })?;
    emit(out, "],\"usages\":[")?;
    emit_list(out, &problem.nodes, |out, node| {
        serde_json::to_writer(out, &node.usages).map_err(IntraOpError::write)
    })?;
    emit(out, "]},\"edges\":{\"nodes\":[")?;
    emit_list(out, &problem.edges, |out, e| {
        emit(out, &format!("[{},{}]", e.a, e.b))
    })?;
    emit(out, "],\"costs\":[")?;
    emit_list(out, &problem.edges, |out, e| {
        emit_costs(out, e.table.cells())
    })?;
    emit(out, "]}")?;
    if let Some(limit) = problem.usage_limit {
        emit(out, &format!(",\"usage_limit\":{limit}"))?;
    }
    emit(out, "}}\n")
}

fn emit(out: &mut impl Write, text: &str) -> Result<(), IntraOpError> {
    out.write_all(text.as_bytes()).map_err(IntraOpError::write)
}

fn emit_list<W: Write, T>(
    out: &mut W,
    items: &[T],
    each: impl Fn(&mut W, &T) -> Result<(), IntraOpError>,
) -> Result<(), IntraOpError> {
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            emit(out, ",")?;
        }
        each(out, item)?;
    }
    Ok(())
}

fn emit_costs(out: &mut impl Write, costs: &[Cost]) -> Result<(), IntraOpError> {
    let mut text = String::from("[");
    for (i, cost) in costs.iter().enumerate() {
        let value = cost.value().unwrap_or(FORBIDDEN_IN_FILES);
        if value >= FORBIDDEN_IN_FILES && !cost.is_forbidden() {
            let what = format!("the finite cost {value} would read as forbidden");
            return Err(IntraOpError::write(what));
        }
        if i > 0 {
            text.push(',');
        }
        text.push_str(&value.to_string());
    }
    text.push(']');
    emit(out, &text)
}

fn read_json(input: impl Read) -> Result<IntraOpProblem, IntraOpError> {
    let mut json = serde_json::Deserializer::from_reader(input);
    let mut parts = Parts::default();
    Root(&mut parts)
        .deserialize(&mut json)
        .map_err(IntraOpError::read)?;
    json.end().map_err(IntraOpError::read)?;
    parts.assemble()
}

/// The lists of the file, before they are checked against each other.
#[derive(Default)]
struct Parts {
    name: Option<String>,
    intervals: Option<Vec<[u64; 2]>>,
    costs: Option<Vec<Vec<Cost>>>,
    usages: Option<Vec<Vec<u64>>>,
    edge_nodes: Option<Vec<[u64; 2]>>,
    edge_costs: Option<EdgeCosts>,
    usage_limit: Option<Option<u64>>,
}

/// Edge tables in the order of the file, equal ones once: `of_edge[e]` indexes `distinct`.
#[derive(Default)]
struct EdgeCosts {
    distinct: Vec<Arc<[Cost]>>,
    of_edge: Vec<u32>,
    known: HashMap<Arc<[Cost]>, u32>,
}

impl EdgeCosts {
    fn push(&mut self, cells: &[Cost]) {
        let id = match self.known.get(cells) {
            Some(&id) => id,
            None => {
                let id = self.distinct.len() as u32;
                let cells: Arc<[Cost]> = cells.into();
                self.distinct.push(Arc::clone(&cells));
                self.known.insert(cells, id);
                id
            }
        };
        self.of_edge.push(id);
    }
}

impl Parts {
    fn assemble(self) -> Result<IntraOpProblem, IntraOpError> {
        let missing = |what: &str| IntraOpError::malformed(what.to_string(), "is missing");
        let intervals = self
            .intervals
            .ok_or_else(|| missing("problem.nodes.intervals"))?;
        let costs = self.costs.ok_or_else(|| missing("problem.nodes.costs"))?;
        let usages = self.usages.ok_or_else(|| missing("problem.nodes.usages"))?;
        let ends = self
            .edge_nodes
            .ok_or_else(|| missing("problem.edges.nodes"))?;
        let tables = self
            .edge_costs
            .ok_or_else(|| missing("problem.edges.costs"))?;
        let n = intervals.len();
        same_length("problem.nodes.costs", costs.len(), "intervals", n)?;
        same_length("problem.nodes.usages", usages.len(), "intervals", n)?;
        let n_tables = tables.of_edge.len();
        same_length("problem.edges.costs", n_tables, "edges.nodes", ends.len())?;
        let nodes: Vec<Node> = costs
            .into_iter()
            .zip(usages)
            .zip(intervals)
            .map(|((costs, usages), interval)| Node {
                costs,
                usages,
                interval,
            })
            .collect();
        let mut problem = IntraOpProblem {
            name: self.name.unwrap_or_default(),
            nodes,
            edges: Vec::new(),
            usage_limit: self.usage_limit.flatten(),
        };
        problem.validate()?;
        problem.edges = edges(&problem.nodes, &ends, &tables)?;
        Ok(problem)
    }
}

fn same_length(place: &str, got: usize, other: &str, want: usize) -> Result<(), IntraOpError> {
    if got == want {
        return Ok(());
    }
    let detail = format!("has {got} entries but {other} has {want}");
    Err(IntraOpError::malformed(place.to_string(), detail))
}

fn edges(nodes: &[Node], ends: &[[u64; 2]], costs: &EdgeCosts) -> Result<Vec<Edge>, IntraOpError> {
    let mut shaped: HashMap<(u32, usize), Arc<Table>> = HashMap::new();
    let mut edges = Vec::with_capacity(ends.len());
    for (e, (&[a, b], &id)) in ends.iter().zip(&costs.of_edge).enumerate() {
        let n_strategies = |v: u64| {
            let node = usize::try_from(v).ok().and_then(|v| nodes.get(v));
            node.map(|node| node.costs.len()).ok_or_else(|| {
                let detail = format!("names node {v} but there are {} nodes", nodes.len());
                IntraOpError::malformed(format!("problem.edges.nodes[{e}]"), detail)
            })
        };
        let (rows, cols) = (n_strategies(a)?, n_strategies(b)?);
        let table = match shaped.get(&(id, rows)) {
            Some(table) if table.n_cols() == cols => Arc::clone(table),
            _ => {
                let cells = Arc::clone(&costs.distinct[id as usize]);
                let n = cells.len();
                let table = Table::new(rows, cols, cells).ok_or_else(|| {
                    let detail = format!(
                        "has {n} entries but nodes {a} and {b} have {rows} x {cols} strategies"
                    );
                    IntraOpError::malformed(format!("problem.edges.costs[{e}]"), detail)
                })?;
                let table = Arc::new(table);
                shaped.insert((id, rows), Arc::clone(&table));
                table
            }
        };
        edges.push(Edge {
            a: a as u32,
            b: b as u32,
            table,
        });
    }
    Ok(edges)
}

/// Visits a JSON object: each key goes to `field`, which must consume the value.
macro_rules! object_visitor {
    ($seed:ident, $what:literal, |$parts:ident, $key:ident, $map:ident| $body:block) => {
        struct $seed<'a>(&'a mut Parts);
        impl<'de> DeserializeSeed<'de> for $seed<'_> {
            type Value = ();
            fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
                d.deserialize_map(self)
            }
        }
        impl<'de> Visitor<'de> for $seed<'_> {
            type Value = ();
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str($what)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut $map: A) -> Result<(), A::Error> {
                let $parts = self.0;
                while let Some(key) = $map.next_key::<String>()? {
                    let $key = key.as_str();
                    $body
                }
                Ok(())
            }
        }
    };
}

object_visitor!(
    Root,
    "an object with a field \"problem\"",
    |parts, key, map| {
        match key {
            "problem" => map.next_value_seed(Problem(parts))?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
    }
);

object_visitor!(Problem, "problem, an object", |parts, key, map| {
    match key {
        "name" => set(&mut parts.name, "problem.name", map.next_value()?)?,
        "nodes" => map.next_value_seed(Nodes(parts))?,
        "edges" => map.next_value_seed(Edges(parts))?,
        "usage_limit" => {
            let place = || "problem.usage_limit".to_string();
            let limit = map.next_value_seed(Number { place: &place })?;
            set(&mut parts.usage_limit, &place(), limit)?;
        }
        _ => drop(map.next_value::<IgnoredAny>()?),
    }
});

object_visitor!(Nodes, "problem.nodes, an object", |parts, key, map| {
    match key {
        "intervals" => {
            let list = pairs(&mut map, "problem.nodes.intervals")?;
            set(&mut parts.intervals, "problem.nodes.intervals", list)?;
        }
        "costs" => {
            let mut list = Vec::new();
            let mut push = |row: &[u64]| list.push(row.iter().map(|&c| from_file(c)).collect());
            rows(&mut map, "problem.nodes.costs", true, &mut push)?;
            set(&mut parts.costs, "problem.nodes.costs", list)?;
        }
        "usages" => {
            let mut list = Vec::new();
            let mut push = |row: &[u64]| list.push(row.to_vec());
            rows(&mut map, "problem.nodes.usages", false, &mut push)?;
            set(&mut parts.usages, "problem.nodes.usages", list)?;
        }
        _ => drop(map.next_value::<IgnoredAny>()?),
    }
});

object_visitor!(Edges, "problem.edges, an object", |parts, key, map| {
    match key {
        "nodes" => {
            let list = pairs(&mut map, "problem.edges.nodes")?;
            set(&mut parts.edge_nodes, "problem.edges.nodes", list)?;
        }
        "costs" => {
            let mut tables = EdgeCosts::default();
            let mut cells = Vec::new();
            let mut push = |row: &[u64]| {
                cells.clear();
                cells.extend(row.iter().map(|&c| from_file(c)));
                tables.push(&cells);
            };
            rows(&mut map, "problem.edges.costs", true, &mut push)?;
            set(&mut parts.edge_costs, "problem.edges.costs", tables)?;
        }
        _ => drop(map.next_value::<IgnoredAny>()?),
    }
});

fn set<T, E: de::Error>(slot: &mut Option<T>, place: &str, value: T) -> Result<(), E> {
    if slot.is_some() {
        return Err(E::custom(format!("{place} is given twice")));
    }
    *slot = Some(value);
    Ok(())
}

fn from_file(cost: u64) -> Cost {
    if cost >= FORBIDDEN_IN_FILES {
        Cost::FORBIDDEN
    } else {
        Cost::finite(cost)
    }
}

fn pairs<'de, A: MapAccess<'de>>(map: &mut A, place: &str) -> Result<Vec<[u64; 2]>, A::Error> {
    let mut list: Vec<[u64; 2]> = Vec::new();
    let mut wrong: Option<(usize, usize)> = None;
    let mut push = |row: &[u64]| match row {
        &[from, to] => list.push([from, to]),
        _ => {
            wrong.get_or_insert((list.len(), row.len()));
        }
    };
    rows(map, place, false, &mut push)?;
    match wrong {
        Some((i, n)) => Err(de::Error::custom(format!(
            "{place}[{i}] has {n} entries but must have 2"
        ))),
        None => Ok(list),
    }
}

/// Reads a list of lists of non-negative integers, handing each inner list to `push`.
fn rows<'de, A: MapAccess<'de>>(
    map: &mut A,
    place: &str,
    is_cost: bool,
    push: &mut dyn FnMut(&[u64]),
) -> Result<(), A::Error> {
    map.next_value_seed(Rows {
        place,
        is_cost,
        push,
    })
}

struct Rows<'a> {
    place: &'a str,
    is_cost: bool,
    push: &'a mut dyn FnMut(&[u64]),
}

impl<'de> DeserializeSeed<'de> for Rows<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Rows<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}, a list of lists", self.place)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut row = Vec::new();
        let mut i = 0;
        loop {
            row.clear();
            let inner = Row {
                place: self.place,
                i,
                is_cost: self.is_cost,
                row: &mut row,
            };
            if seq.next_element_seed(inner)?.is_none() {
                return Ok(());
            }
            (self.push)(&row);
            i += 1;
        }
    }
}

struct Row<'a> {
    place: &'a str,
    i: usize,
    is_cost: bool,
    row: &'a mut Vec<u64>,
}

impl<'de> DeserializeSeed<'de> for Row<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<(), D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Row<'_> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}[{}], a list of integers", self.place, self.i)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        loop {
            let j = self.row.len();
            let place = || format!("{}[{}][{j}]", self.place, self.i);
            let number = if self.is_cost {
                seq.next_element_seed(CostNumber { place: &place })?
            } else {
                match seq.next_element_seed(Number { place: &place })? {
                    Some(None) => return Err(de::Error::custom(format!("{} is null", place()))),
                    other => other.flatten(),
                }
            };
            match number {
                Some(number) => self.row.push(number),
                None => return Ok(()),
            }
        }
    }
}

/// A non-negative 64-bit integer, or `null`.
struct Number<'a> {
    place: &'a dyn Fn() -> String,
}

impl<'de> DeserializeSeed<'de> for Number<'_> {
    type Value = Option<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Option<u64>, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Number<'_> {
    type Value = Option<u64>;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}, a non-negative 64-bit integer", (self.place)())
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Option<u64>, E> {
        Ok(Some(value))
    }
    fn visit_unit<E: de::Error>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }
}

/// A cost. Integers beyond 64 bits arrive as floats and are forbidden, being over 10^18;
/// other floats are refused.
struct CostNumber<'a> {
    place: &'a dyn Fn() -> String,
}

impl<'de> DeserializeSeed<'de> for CostNumber<'_> {
    type Value = u64;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<u64, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for CostNumber<'_> {
    type Value = u64;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}, a non-negative integer", (self.place)())
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<u64, E> {
        Ok(value)
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<u64, E> {
        if value >= u64::MAX as f64 {
            Ok(u64::MAX)
        } else {
            Err(E::invalid_type(de::Unexpected::Float(value), &self))
        }
    }
}
