//! One op of the text, and the references and types in it.

use super::{Body, Parser, Spanned};
use crate::text::scan::Scanner;
use crate::text::{HOLE, MAX_RANK, PASSES, ParseError, REGIONS, attributes, origins};
use crate::{OpKind, Pass, Region, Shape, TensorType};
use serde_json::Value;
use std::ops::Range;

/// An operand as written.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// A value; without a stride it is the copy's own in a body, else the same for all.
    Value { first: i64, stride: Option<i64> },
    /// A carried value of the `repeat`.
    Carried(usize),
}

/// An op as written.
pub(super) struct Statement {
    pub(super) span: Range<usize>,
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) operands: Vec<Spanned<Operand>>,
    pub(super) types: Vec<TensorType>,
    pub(super) types_span: Range<usize>,
    pub(super) path: String,
    pub(super) pass: Pass,
    pub(super) region: Region,
    pub(super) origin: Origin,
}

/// An origin as written.
pub(super) struct Origin {
    pub(super) name: &'static str,
    pub(super) number: Option<u32>,
    pub(super) of: Option<Spanned<Operand>>,
}

pub(super) enum Kind {
    Plain(OpKind),
    /// Attributes with holes in strings.
    Template(Value),
}

/// A value as written.
pub(super) enum Reference {
    Number(i64),
    Name(String),
}

impl Parser<'_> {
    pub(super) fn statement(&mut self, body: &mut Body) -> Result<Statement, ParseError> {
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
        let types_span = types_start..self.s.token_end();
        if types.len() != n_results {
            let message = format!("{n_results} results, but {} types", types.len());
            return Err(self.s.error(types_span, message));
        }
        self.s.expect("@")?;
        let path = self.s.path(body.repeat)?.to_string();
        let pass = self.s.choice("the pass", &PASSES)?;
        let region = self.s.choice("the region", &REGIONS)?;
        let origin = self.origin(body)?;
        let span = start..self.s.token_end();
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
            origin,
        })
    }

    /// The origin, if one is written.
    fn origin(&mut self, body: &Body) -> Result<Origin, ParseError> {
        let word = self.s.peek_word();
        let known = origins().find(|(name, ..)| *name == word);
        let Some((name, has_number, has_op)) = known else {
            return Ok(Origin {
                name: "forward",
                number: None,
                of: None,
            });
        };
        self.s.expect_word(name)?;
        let number = match has_number {
            true => Some(
                self.s
                    .number::<u32>("the number of the operand or result")?,
            ),
            false => None,
        };
        let mut of = None;
        if has_op {
            self.s.expect_word("of")?;
            of = Some(self.operand(body)?);
        }
        Ok(Origin { name, number, of })
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
                    if self.names.contains_key(&name) || body.carried.contains_key(&name) {
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
            let mut error = self.s.error(start..self.s.token_end(), message);
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
    fn operands(&mut self, body: &Body) -> Result<Vec<Spanned<Operand>>, ParseError> {
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

    fn operand(&mut self, body: &Body) -> Result<Spanned<Operand>, ParseError> {
        let (reference, span) = self.reference()?;
        if let Reference::Name(name) = &reference
            && let Some(&i) = body.carried.get(name)
        {
            return Ok((Operand::Carried(i), span));
        }
        let first = self.resolve(reference, &span)?;
        let stride = if body.repeat && self.s.touching() == Some('[') {
            Some(self.stride()?)
        } else {
            None
        };
        Ok((
            Operand::Value { first, stride },
            span.start..self.s.token_end(),
        ))
    }

    /// `[+s]` or `[-s]`.
    fn stride(&mut self) -> Result<i64, ParseError> {
        let start = self.s.token_start();
        self.s.expect("[")?;
        let negative = self.s.eat("-");
        if !negative {
            self.s.expect("+")?;
        }
        let n: u64 = self.s.number("the distance from copy to copy")?;
        self.s.expect("]")?;
        match u32::try_from(n) {
            Ok(n) if negative => Ok(-i64::from(n)),
            Ok(n) => Ok(i64::from(n)),
            Err(_) => Err(self.s.error(
                start..self.s.token_end(),
                format!("the distance {n} is too large"),
            )),
        }
    }

    /// `%3` or `%x`.
    pub(super) fn reference(&mut self) -> Result<Spanned<Reference>, ParseError> {
        let start = self.s.token_start();
        if !self.s.eat("%") {
            return Err(self.s.error_here("expected a value, such as `%3`".into()));
        }
        let reference = match self.s.touching() {
            Some(c) if c.is_ascii_digit() => {
                let n: u64 = self.s.number("the number of a value")?;
                match u32::try_from(n) {
                    Ok(n) => Reference::Number(i64::from(n)),
                    Err(_) => {
                        return Err(self
                            .s
                            .error(start..self.s.token_end(), format!("there is no value %{n}")));
                    }
                }
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                Reference::Name(self.s.word("a name")?.to_string())
            }
            _ => {
                return Err(self.s.error(
                    start..self.s.token_end(),
                    "`%` needs a number or a name behind it".into(),
                ));
            }
        };
        Ok((reference, start..self.s.token_end()))
    }

    pub(super) fn resolve(
        &self,
        reference: Reference,
        span: &Range<usize>,
    ) -> Result<i64, ParseError> {
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

    pub(super) fn value(&mut self) -> Result<Spanned<i64>, ParseError> {
        let (reference, span) = self.reference()?;
        Ok((self.resolve(reference, &span)?, span))
    }

    fn tensor_type(&mut self) -> Result<TensorType, ParseError> {
        let start = self.s.token_start();
        let dtype = self.s.dtype()?;
        self.s.expect("[")?;
        let dims = self.s.list("]", Scanner::dim)?;
        if dims.len() > MAX_RANK {
            return Err(self.s.error(
                start..self.s.token_end(),
                format!("more than {MAX_RANK} dims"),
            ));
        }
        Ok(TensorType::new(dtype, Shape(dims)))
    }
}
