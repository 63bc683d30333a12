//! Parsing. Statements are read one by one and added at once, those of a `repeat` body once
//! per copy.

use super::scan::Scanner;
use super::{HOLE, MAX_EXPANDED_BYTES, MAX_LAYERS, MAX_OPS, MAX_RANK, PASSES, ParseError, REGIONS};
use super::{attributes, fold::Numbered};
use crate::{DType, Graph, LayerId, OpKind, Pass, Place, Region, Shape, TensorType, ValueId};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// Expanded text that every op stands for besides its own line.
const OP_OVERHEAD: u64 = 64;

/// The graph that a text describes; see the module header.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut parser = Parser {
        s: Scanner::new(text),
        graph: Graph::default(),
        names: BTreeMap::new(),
        layers: BTreeMap::new(),
        expanded: 0,
    };
    parser.graph()?;
    Ok(parser.graph)
}

struct Parser<'a> {
    s: Scanner<'a>,
    graph: Graph,
    /// Values with names.
    names: BTreeMap<String, i64>,
    /// First layer of each name.
    layers: BTreeMap<String, LayerId>,
    /// Bytes of text that the graph so far stands for.
    expanded: u64,
}

/// An operand as written.
#[derive(Clone, Copy)]
enum Operand {
    /// A value; without a stride it is the copy's own in a body, else the same for all.
    Value { first: i64, stride: Option<i64> },
    /// A carried value of the `repeat`.
    Carried(usize),
}

/// An op as written.
struct Statement {
    span: Range<usize>,
    name: &'static str,
    kind: Kind,
    operands: Vec<(Operand, Range<usize>)>,
    types: Vec<TensorType>,
    types_span: Range<usize>,
    path: String,
    pass: Pass,
    region: Region,
}

enum Kind {
    Plain(OpKind),
    /// Attributes with holes in strings.
    Template(Value),
}

/// Where statements stand: on their own, or in the body of a `repeat`.
struct Body {
    repeat: bool,
    /// Number of the first result.
    base: i64,
    /// Results so far.
    width: i64,
    carried: Vec<(String, i64)>,
    /// Names given in the body.
    named: Vec<String>,
}

/// A copy of a body.
struct Copy<'b> {
    k: i64,
    base: i64,
    width: i64,
    /// First and later value of each carried name.
    carried: &'b [(i64, i64)],
    layer: Option<LayerId>,
    /// What `{i}` stands for.
    number: Option<String>,
}

impl Parser<'_> {
    fn graph(&mut self) -> Result<(), ParseError> {
        self.s.expect_word("graph")?;
        self.graph.name = self.s.string()?;
        self.s.expect("{")?;
        if self.s.eat_word("layers") {
            self.layers()?;
        }
        loop {
            if self.s.eat_word("return") {
                self.outputs()?;
                self.s.expect("}")?;
                break;
            }
            if self.s.eat("}") {
                break;
            }
            match self.s.peek_word() {
                "repeat" => self.repeat()?,
                _ => self.single()?,
            }
        }
        self.s.end()
    }

    fn layers(&mut self) -> Result<(), ParseError> {
        loop {
            let start = self.s.token_start();
            let name = self.s.string()?;
            if self.s.eat_word("from") {
                let from = self.s.number("the first number")?;
                self.s.expect_word("to")?;
                let to = self.s.number("the last number")?;
                let span = start..self.s.pos();
                if !name.contains(HOLE) {
                    return Err(self
                        .s
                        .error(span, format!("`{name}` has no `{HOLE}` for the number")));
                }
                if from > to || to > u64::from(u32::MAX) {
                    return Err(self
                        .s
                        .error(span, format!("there are no layers {from} to {to}")));
                }
                for i in from..=to {
                    self.layer(name.replace(HOLE, &i.to_string()), span.clone())?;
                }
            } else {
                self.layer(name, start..self.s.pos())?;
            }
            if !self.s.eat(",") {
                return Ok(());
            }
        }
    }

    fn layer(&mut self, name: String, span: Range<usize>) -> Result<(), ParseError> {
        if self.graph.layers.len() >= MAX_LAYERS {
            return Err(self.s.error(span, format!("more than {MAX_LAYERS} layers")));
        }
        self.spend(name.len() as u64, span)?;
        let id = self.graph.add_layer(name.clone());
        self.layers.entry(name).or_insert(id);
        Ok(())
    }

    fn spend(&mut self, bytes: u64, span: Range<usize>) -> Result<(), ParseError> {
        self.expanded = self.expanded.saturating_add(bytes);
        if self.expanded > MAX_EXPANDED_BYTES {
            return Err(self.s.error(
                span,
                format!("the graph stands for more than {MAX_EXPANDED_BYTES} bytes of text"),
            ));
        }
        Ok(())
    }

    fn outputs(&mut self) -> Result<(), ParseError> {
        loop {
            let (id, span) = self.value()?;
            let id = self.defined(id, &span, "")?;
            self.graph.outputs.push(id);
            if !self.s.eat(",") {
                return Ok(());
            }
        }
    }

    /// An op outside of any `repeat`.
    fn single(&mut self) -> Result<(), ParseError> {
        let base = self.graph.values().len() as i64;
        let mut body = Body {
            repeat: false,
            base,
            width: 0,
            carried: vec![],
            named: vec![],
        };
        let statement = self.statement(&mut body)?;
        let layer = if self.s.eat_word("world") {
            None
        } else {
            Some(self.layer_number()?)
        };
        let copy = Copy {
            k: 0,
            base,
            width: body.width,
            carried: &[],
            layer,
            number: None,
        };
        self.add(&statement, &copy)
    }

    fn layer_number(&mut self) -> Result<LayerId, ParseError> {
        let start = self.s.token_start();
        if !self.s.eat_word("layer") {
            return Err(self
                .s
                .error_here("expected `layer` and its number, or `world`".into()));
        }
        let n = self.s.number("the number of a layer")?;
        let count = self.graph.layers.len();
        match usize::try_from(n).ok().filter(|&n| n < count) {
            Some(n) => Ok(LayerId::new(n)),
            None => Err(self.s.error(
                start..self.s.pos(),
                format!("there is no layer {n}; the graph has {count}"),
            )),
        }
    }

    fn repeat(&mut self) -> Result<(), ParseError> {
        let start = self.s.token_start();
        self.s.expect_word("repeat")?;
        let n = self.s.number("the number of copies")?;
        self.s.expect_word("as")?;
        let template = self.s.string()?;
        self.s.expect_word("from")?;
        let from = self.s.number("the first number")?;
        let down = self.s.eat_word("down");
        let header = start..self.s.pos();
        if !template.contains(HOLE) {
            return Err(self.s.error(
                header,
                format!("`{template}` has no `{HOLE}` for the number"),
            ));
        }
        if n == 0 || n > MAX_OPS as u64 {
            return Err(self.s.error(
                header,
                format!("{n} copies; from 1 to {MAX_OPS} are possible"),
            ));
        }
        let (body, statements, carried) = self.body()?;
        if statements.is_empty() {
            return Err(self.s.error(header, "the `repeat` has no ops".into()));
        }
        if self.graph.ops().len() + n as usize * statements.len() > MAX_OPS {
            return Err(self
                .s
                .error(header, format!("the graph has more than {MAX_OPS} ops")));
        }
        for k in 0..n {
            let number = u32::try_from(from)
                .ok()
                .and_then(|from| Numbered::number(from, down, k));
            let Some(number) = number.map(|i| i.to_string()) else {
                return Err(self.s.error(header, format!("copy {k} has no number")));
            };
            let name = template.replace(HOLE, &number);
            let Some(&layer) = self.layers.get(&name) else {
                return Err(self.s.error(header, format!("there is no layer `{name}`")));
            };
            let Body { base, width, .. } = body;
            let copy = Copy {
                k: k as i64,
                base,
                width,
                carried: &carried,
                layer: Some(layer),
                number: Some(number),
            };
            for statement in &statements {
                self.add(statement, &copy)?;
            }
        }
        // From here on the names of the body mean the last copy's values.
        for name in &body.named {
            self.names
                .entry(name.clone())
                .and_modify(|v| *v += (n as i64 - 1) * body.width);
        }
        Ok(())
    }

    /// Carried values and statements of a `repeat`.
    #[allow(clippy::type_complexity)]
    fn body(&mut self) -> Result<(Body, Vec<Statement>, Vec<(i64, i64)>), ParseError> {
        let base = self.graph.values().len() as i64;
        let mut body = Body {
            repeat: true,
            base,
            width: 0,
            carried: vec![],
            named: vec![],
        };
        let mut later = Vec::new();
        if self.s.eat("(") {
            loop {
                let (name, first, next) = self.carry(&body)?;
                body.carried.push((name, first));
                later.push(next);
                if self.s.eat(")") {
                    break;
                }
                self.s.expect(",")?;
            }
        }
        self.s.expect("{")?;
        let mut statements = Vec::new();
        while !self.s.eat("}") {
            if self.s.peek_word() == "repeat" {
                return Err(self
                    .s
                    .error_here("a `repeat` stands inside a `repeat`".into()));
            }
            statements.push(self.statement(&mut body)?);
        }
        let mut carried = Vec::with_capacity(later.len());
        for ((_, first), (next, span)) in body.carried.iter().zip(later) {
            let next = self.resolve(next, &span)?;
            if !(base..base + body.width).contains(&next) {
                return Err(self
                    .s
                    .error(span, format!("%{next} is not a value of the body")));
            }
            carried.push((*first, next));
        }
        Ok((body, statements, carried))
    }

    /// `%name = %first then %next`, of which `next` may be a value of the coming body.
    fn carry(
        &mut self,
        body: &Body,
    ) -> Result<(String, i64, (Reference, Range<usize>)), ParseError> {
        let (reference, span) = self.reference()?;
        let Reference::Name(name) = reference else {
            return Err(self
                .s
                .error(span, "a carried value needs a name, such as `%x`".into()));
        };
        if self.names.contains_key(&name) || body.carried.iter().any(|(n, _)| *n == name) {
            return Err(self.s.error(span, format!("`%{name}` is taken")));
        }
        self.s.expect("=")?;
        let (first, _) = self.value()?;
        self.s.expect_word("then")?;
        Ok((name, first, self.reference()?))
    }

    fn statement(&mut self, body: &mut Body) -> Result<Statement, ParseError> {
        let start = self.s.token_start();
        if self.s.peek() != Some('%') {
            return Err(self
                .s
                .error_here("expected an op, `repeat`, `return` or `}`".into()));
        }
        let n_results = self.results(body)?;
        self.s.expect("=")?;
        let (name, kind) = self.kind(body.repeat)?;
        let operands = self.operands(body)?;
        let types_start = self.s.token_start();
        let mut types = vec![self.tensor_type()?];
        while self.s.eat(",") {
            types.push(self.tensor_type()?);
        }
        let types_span = types_start..self.s.pos();
        if types.len() != n_results {
            let message = format!("{n_results} results, but {} types", types.len());
            return Err(self.s.error(types_span, message));
        }
        self.s.expect("@")?;
        let path = self.s.path(body.repeat)?.to_string();
        let pass = self.choice("the pass", &PASSES)?;
        let region = self.choice("the region", &REGIONS)?;
        let span = start..self.s.pos();
        Ok(Statement {
            span,
            name,
            kind,
            operands,
            types,
            types_span,
            path,
            pass,
            region,
        })
    }

    /// Results up to the `=`; they take the next numbers.
    fn results(&mut self, body: &mut Body) -> Result<usize, ParseError> {
        let mut n = 0;
        loop {
            let (reference, span) = self.reference()?;
            let next = body.base + body.width;
            match reference {
                Reference::Number(id) if id == next => {}
                Reference::Number(id) => {
                    let mut error = self.s.error(
                        span,
                        format!("result %{id} is out of order: the next number is %{next}"),
                    );
                    error.help = Some(
                        "values are numbered as they are defined; a name, such as `%x`, is free"
                            .into(),
                    );
                    return Err(error);
                }
                Reference::Name(name) => {
                    if self.names.contains_key(&name)
                        || body.carried.iter().any(|(n, _)| *n == name)
                    {
                        return Err(self.s.error(span, format!("`%{name}` is taken")));
                    }
                    self.names.insert(name.clone(), next);
                    body.named.push(name);
                }
            }
            body.width += 1;
            n += 1;
            if !self.s.eat(",") {
                return Ok(n);
            }
        }
    }

    fn kind(&mut self, holes: bool) -> Result<(&'static str, Kind), ParseError> {
        let start = self.s.token_start();
        let name = self.s.word("the name of an op")?;
        let given = if self.s.peek() == Some('{') {
            Some(attributes::read(&mut self.s)?)
        } else {
            None
        };
        let kind = attributes::join(name, given.as_ref()).map_err(|(message, help)| {
            let mut error = self.s.error(start..self.s.pos(), message);
            error.help = help;
            error
        })?;
        let name = kind.name();
        Ok((
            name,
            match given {
                Some(v) if holes && attributes::any_string(&v, &|s| s.contains(HOLE)) => {
                    Kind::Template(v)
                }
                _ => Kind::Plain(kind),
            },
        ))
    }

    /// Operands up to the `:`.
    fn operands(&mut self, body: &Body) -> Result<Vec<(Operand, Range<usize>)>, ParseError> {
        let mut operands = Vec::new();
        if self.s.eat(":") {
            return Ok(operands);
        }
        loop {
            operands.push(self.operand(body)?);
            if self.s.eat(":") {
                return Ok(operands);
            }
            if !self.s.eat(",") {
                return Err(self
                    .s
                    .error_here("expected `,` or `:` after an operand".into()));
            }
        }
    }

    fn operand(&mut self, body: &Body) -> Result<(Operand, Range<usize>), ParseError> {
        let (reference, span) = self.reference()?;
        if let Reference::Name(name) = &reference
            && let Some(i) = body.carried.iter().position(|(n, _)| n == name)
        {
            return Ok((Operand::Carried(i), span));
        }
        let first = self.resolve(reference, &span)?;
        let stride = if body.repeat && self.s.touching() == Some('[') {
            Some(self.stride()?)
        } else {
            None
        };
        Ok((Operand::Value { first, stride }, span.start..self.s.pos()))
    }

    /// `[+s]` or `[-s]`.
    fn stride(&mut self) -> Result<i64, ParseError> {
        let start = self.s.token_start();
        self.s.expect("[")?;
        let negative = self.s.eat("-");
        if !negative {
            self.s.expect("+")?;
        }
        let n = self.s.number("the distance from copy to copy")?;
        self.s.expect("]")?;
        match u32::try_from(n) {
            Ok(n) if negative => Ok(-i64::from(n)),
            Ok(n) => Ok(i64::from(n)),
            Err(_) => Err(self.s.error(
                start..self.s.pos(),
                format!("the distance {n} is too large"),
            )),
        }
    }

    /// `%3` or `%x`.
    fn reference(&mut self) -> Result<(Reference, Range<usize>), ParseError> {
        let start = self.s.token_start();
        if !self.s.eat("%") {
            return Err(self.s.error_here("expected a value, such as `%3`".into()));
        }
        let reference = match self.s.touching() {
            Some(c) if c.is_ascii_digit() => {
                let n = self.s.number("the number of a value")?;
                match u32::try_from(n) {
                    Ok(n) => Reference::Number(i64::from(n)),
                    Err(_) => {
                        return Err(self
                            .s
                            .error(start..self.s.pos(), format!("there is no value %{n}")));
                    }
                }
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                Reference::Name(self.s.word("a name")?.to_string())
            }
            _ => {
                return Err(self.s.error(
                    start..self.s.pos(),
                    "`%` needs a number or a name behind it".into(),
                ));
            }
        };
        Ok((reference, start..self.s.pos()))
    }

    fn resolve(&self, reference: Reference, span: &Range<usize>) -> Result<i64, ParseError> {
        match reference {
            Reference::Number(n) => Ok(n),
            Reference::Name(name) => match self.names.get(&name) {
                Some(&v) => Ok(v),
                None => Err(self
                    .s
                    .error(span.clone(), format!("no value is called `%{name}`"))),
            },
        }
    }

    fn value(&mut self) -> Result<(i64, Range<usize>), ParseError> {
        let (reference, span) = self.reference()?;
        Ok((self.resolve(reference, &span)?, span))
    }

    /// The value of this number, which must be defined by now.
    fn defined(&self, id: i64, span: &Range<usize>, copy: &str) -> Result<ValueId, ParseError> {
        match usize::try_from(id)
            .ok()
            .filter(|&i| i < self.graph.values().len())
        {
            Some(i) => Ok(ValueId::new(i)),
            None => Err(self.s.error(
                span.clone(),
                format!("value %{id} is not defined before its use{copy}"),
            )),
        }
    }

    fn tensor_type(&mut self) -> Result<TensorType, ParseError> {
        let start = self.s.token_start();
        let word = self.s.word("a type, such as `f32[B,8]`")?;
        let Some(dtype) = DType::ALL.into_iter().find(|d| d.name() == word) else {
            let mut error = self.s.error(
                start..self.s.pos(),
                format!("`{word}` is not an element type"),
            );
            error.help = Some(format!(
                "the element types are {}",
                DType::ALL.map(DType::name).join(", ")
            ));
            return Err(error);
        };
        self.s.expect("[")?;
        let dims = self.s.list("]", Scanner::dim)?;
        if dims.len() > MAX_RANK {
            return Err(self
                .s
                .error(start..self.s.pos(), format!("more than {MAX_RANK} dims")));
        }
        Ok(TensorType::new(dtype, Shape(dims)))
    }

    fn choice<T: core::marker::Copy>(
        &mut self,
        what: &str,
        known: &[(T, &str)],
    ) -> Result<T, ParseError> {
        let start = self.s.token_start();
        let word = self.s.word(what)?;
        match known.iter().find(|(_, name)| *name == word) {
            Some((value, _)) => Ok(*value),
            None => {
                let names: Vec<&str> = known.iter().map(|(_, name)| *name).collect();
                let mut error = self
                    .s
                    .error(start..self.s.pos(), format!("`{word}` is not {what}"));
                error.help = Some(format!("{what} is one of {}", names.join(", ")));
                Err(error)
            }
        }
    }

    /// Adds one copy of an op.
    fn add(&mut self, statement: &Statement, copy: &Copy) -> Result<(), ParseError> {
        self.spend(
            statement.span.len() as u64 + OP_OVERHEAD,
            statement.span.clone(),
        )?;
        if self.graph.ops().len() >= MAX_OPS {
            return Err(self.s.error(
                statement.span.clone(),
                format!("the graph has more than {MAX_OPS} ops"),
            ));
        }
        let fill = |s: &str| {
            copy.number
                .as_ref()
                .map_or_else(|| s.to_string(), |n| s.replace(HOLE, n))
        };
        let place = copy
            .number
            .as_ref()
            .map_or(String::new(), |n| format!(" in the copy with {HOLE} = {n}"));
        let mut inputs = Vec::with_capacity(statement.operands.len());
        for (operand, span) in &statement.operands {
            inputs.push(self.defined(copy.value(*operand), span, &place)?);
        }
        let kind = match &statement.kind {
            Kind::Plain(kind) => kind.clone(),
            Kind::Template(v) => {
                attributes::join(statement.name, Some(&attributes::map_strings(v, &fill))).map_err(
                    |(message, _)| self.s.error(statement.span.clone(), message + &place),
                )?
            }
        };
        let at = Place {
            path: fill(&statement.path),
            pass: statement.pass,
            region: statement.region,
            layer: copy.layer,
        };
        let declared = &statement.types;
        let results = match (&kind, &declared[..]) {
            (OpKind::Input { .. } | OpKind::State { .. }, [ty]) if inputs.is_empty() => {
                self.graph.add_source(kind, ty.clone(), at).map(|v| vec![v])
            }
            _ => self.graph.add(kind, &inputs, at),
        };
        let results =
            results.map_err(|e| self.s.error(statement.span.clone(), format!("{e}{place}")))?;
        let inferred = results.iter().map(|&v| self.graph.ty(v));
        if !inferred.clone().eq(declared) {
            let list = |types: Vec<String>| types.join(", ");
            let (inferred, declared) = (
                list(inferred.map(|t| t.to_string()).collect()),
                list(declared.iter().map(|t| t.to_string()).collect()),
            );
            let message = format!("the results are {inferred}, the text says {declared}{place}");
            return Err(self.s.error(statement.types_span.clone(), message));
        }
        Ok(())
    }
}

impl Copy<'_> {
    /// The number of an operand's value in this copy.
    fn value(&self, operand: Operand) -> i64 {
        match operand {
            Operand::Value { first, stride } => {
                let usual = if first < self.base { 0 } else { self.width };
                first + self.k * stride.unwrap_or(usual)
            }
            Operand::Carried(i) => match self.carried[i] {
                (first, _) if self.k == 0 => first,
                (_, next) => next + (self.k - 1) * self.width,
            },
        }
    }
}

/// A value as written.
enum Reference {
    Number(i64),
    Name(String),
}
