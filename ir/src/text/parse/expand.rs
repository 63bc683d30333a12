//! Adding the copies of a statement to the graph.

use super::Parser;
use super::statement::{Kind, Operand, Statement};
use crate::text::{HOLE, MAX_OPS, ParseError, attributes};
use crate::{LayerId, OpId, OpKind, Origin, Place, ValueId};
use std::ops::Range;

/// Expanded text that every op stands for besides its own line.
const OP_OVERHEAD: u64 = 64;

/// A copy of a body.
pub(super) struct Instance<'b> {
    pub(super) k: i64,
    pub(super) base: i64,
    pub(super) width: i64,
    /// First and later value of each carried name.
    pub(super) carried: &'b [(i64, i64)],
    pub(super) layer: Option<LayerId>,
    /// The number that `{i}` stands for.
    pub(super) number: Option<String>,
}

impl Parser<'_> {
    /// The value of this number, which must be defined by now.
    pub(super) fn defined(
        &self,
        id: i64,
        span: &Range<usize>,
        copy: &str,
    ) -> Result<ValueId, ParseError> {
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

    /// Adds one copy of an op.
    pub(super) fn add(&mut self, statement: &Statement, copy: &Instance) -> Result<(), ParseError> {
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
        let written = &statement.origin;
        let of = match &written.of {
            Some((operand, span)) => {
                let v = self.defined(copy.value(*operand), span, &place)?;
                self.graph.value(v).producer
            }
            None => OpId(0),
        };
        let mut origins = Origin::all(of, written.number.unwrap_or(0)).into_iter();
        let origin = origins.find(|o| o.name().0 == written.name);
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
        self.graph.mark_last(origin.unwrap_or_default());
        Ok(())
    }
}

impl Instance<'_> {
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
