//! Parsing. Statements are read one by one and added at once, those of a `repeat` body once
//! per copy.

mod expand;
mod statement;

use super::fold::Numbered;
use super::scan::Scanner;
use super::{HOLE, MAX_EXPANDED_BYTES, MAX_LAYERS, MAX_OPS, ONLY_LAYER, ParseError};
use crate::{Graph, LayerId};
use expand::Instance;
use statement::{Reference, Statement};
use std::collections::BTreeMap;
use std::ops::Range;

/// The graph that a text describes; see the module header.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut parser = Parser {
        s: Scanner::new(text),
        graph: Graph::default(),
        names: BTreeMap::new(),
        layers: BTreeMap::new(),
        undeclared: false,
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
    /// True when the text declares no layers.
    undeclared: bool,
    /// Bytes of text that the graph so far stands for.
    expanded: u64,
}

/// Where statements stand: on their own, or in the body of a `repeat`.
struct Body {
    repeat: bool,
    /// Number of the first result.
    base: i64,
    /// Results so far.
    width: i64,
    /// Names of carried values.
    carried: BTreeMap<String, usize>,
    /// Names given in the body.
    named: Vec<String>,
}

/// A `repeat` as written.
struct Repeated {
    body: Body,
    statements: Vec<Statement>,
    /// First and later value of each carried name.
    carried: Vec<(i64, i64)>,
}

/// With its place in the text.
type Spanned<T> = (T, Range<usize>);

impl Parser<'_> {
    fn graph(&mut self) -> Result<(), ParseError> {
        self.s.expect_word("graph")?;
        self.graph.name = self.s.string()?;
        self.s.expect("{")?;
        if self.s.eat_word("layers") {
            self.layers()?;
        } else {
            self.undeclared = true;
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
                let from: u64 = self.s.number("the first number")?;
                self.s.expect_word("to")?;
                let to = self.s.number("the last number")?;
                let span = start..self.s.token_end();
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
                self.layer(name, start..self.s.token_end())?;
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
            carried: BTreeMap::new(),
            named: vec![],
        };
        let statement = self.statement(&mut body)?;
        let layer = if self.s.eat_word("world") {
            None
        } else if self.undeclared && self.s.peek_word() != "layer" {
            Some(self.only_layer())
        } else {
            Some(self.layer_number()?)
        };
        let copy = Instance {
            k: 0,
            base,
            width: body.width,
            carried: &[],
            layer,
            number: None,
        };
        self.add(&statement, &copy)
    }

    /// The layer of all ops in a text that declares none.
    fn only_layer(&mut self) -> LayerId {
        if self.graph.layers.is_empty() {
            self.graph.add_layer(ONLY_LAYER);
        }
        LayerId::new(0)
    }

    fn layer_number(&mut self) -> Result<LayerId, ParseError> {
        let start = self.s.token_start();
        if !self.s.eat_word("layer") {
            return Err(self
                .s
                .error_here("expected `layer` and its number, or `world`".into()));
        }
        let n: u64 = self.s.number("the number of a layer")?;
        let count = self.graph.layers.len();
        match usize::try_from(n).ok().filter(|&n| n < count) {
            Some(n) => Ok(LayerId::new(n)),
            None => Err(self.s.error(
                start..self.s.token_end(),
                format!("there is no layer {n}; the graph has {count}"),
            )),
        }
    }

    fn repeat(&mut self) -> Result<(), ParseError> {
        let start = self.s.token_start();
        self.s.expect_word("repeat")?;
        let n: u64 = self.s.number("the number of copies")?;
        self.s.expect_word("as")?;
        let template = self.s.string()?;
        self.s.expect_word("from")?;
        let from: u64 = self.s.number("the first number")?;
        let down = self.s.eat_word("down");
        let header = start..self.s.token_end();
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
        let Repeated {
            body,
            statements,
            carried,
        } = self.body()?;
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
            let layer = match self.layers.get(&name) {
                Some(&layer) => layer,
                None if self.undeclared => self.only_layer(),
                None => return Err(self.s.error(header, format!("there is no layer `{name}`"))),
            };
            let Body { base, width, .. } = body;
            let copy = Instance {
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
    fn body(&mut self) -> Result<Repeated, ParseError> {
        let base = self.graph.values().len() as i64;
        let mut body = Body {
            repeat: true,
            base,
            width: 0,
            carried: BTreeMap::new(),
            named: vec![],
        };
        let mut pairs = Vec::new();
        if self.s.eat("(") {
            loop {
                let (name, first, next) = self.carry(&body)?;
                body.carried.insert(name, pairs.len());
                pairs.push((first, next));
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
        let mut carried = Vec::with_capacity(pairs.len());
        for (first, (next, span)) in pairs {
            let next = self.resolve(next, &span)?;
            if !(base..base + body.width).contains(&next) {
                return Err(self
                    .s
                    .error(span, format!("%{next} is not a value of the body")));
            }
            carried.push((first, next));
        }
        Ok(Repeated {
            body,
            statements,
            carried,
        })
    }

    /// `%name = %first then %next`, of which `next` may be a value of the coming body.
    fn carry(&mut self, body: &Body) -> Result<(String, i64, Spanned<Reference>), ParseError> {
        let (reference, span) = self.reference()?;
        let Reference::Name(name) = reference else {
            return Err(self
                .s
                .error(span, "a carried value needs a name, such as `%x`".into()));
        };
        if self.names.contains_key(&name) || body.carried.contains_key(&name) {
            return Err(self.s.error(span, format!("`%{name}` is taken")));
        }
        self.s.expect("=")?;
        let (first, _) = self.value()?;
        self.s.expect_word("then")?;
        Ok((name, first, self.reference()?))
    }
}
