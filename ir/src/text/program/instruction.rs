//! One line of a template, both ways: the operation with its operands, and what every
//! instruction has, its stream and its waits among it.

use super::parse::Parser;
use super::print::{Printer, name};
use super::{INPUTS, input_name, list, reductions};
use crate::collective::{CollectiveKind, Contract, Order, Sum};
use crate::op::InputKind;
use crate::program::{Call, CollectiveItem, Event, InstrKind, Instruction, RoleProgram, Which};
use crate::reshard::LayoutStep;
use crate::text::{PASSES, ParseError, attributes, word_of};
use crate::{AxisId, BufferId, DType, InstrId, LayerId, TransferId};
use std::fmt::Write;

/// The layout change that needs no communication.
const SLICE: &str = "local_slice";
const MEMBERS: &str = "(members)";

impl Printer<'_> {
    /// Instruction `id` of its template.
    pub(super) fn instruction(&self, id: InstrId, i: &Instruction) -> String {
        let stream = self.role.stream(i.stream).name(&self.role.mesh);
        let (what, pass) = (self.operation(&i.kind), word_of(i.pass, &PASSES));
        let mut line = format!("{id} {what} [{stream} {pass}");
        if let Some(layer) = i.layer {
            let _ = write!(line, " {layer}");
        }
        line.push_str(match i.call {
            Call::Own => "",
            Call::Chained { is_kept: false } => " chained",
            Call::Chained { is_kept: true } => " chained kept",
            Call::Joined => " joined",
        });
        let deps = i.deps.iter().map(InstrId::to_string);
        let waits = list(deps.chain(i.events.iter().map(|e| self.event(e))));
        if !waits.is_empty() {
            let _ = write!(line, " after {waits}");
        }
        line + "]"
    }

    /// The operands' type, where it is not that of the first one's buffer, and the sum.
    fn contract(&self, contract: &Contract, first: Option<BufferId>) -> String {
        let buffer = first.and_then(|b| self.role.buffers.get(b.index()));
        let operand = match buffer.map(|b| b.dtype) {
            Some(dtype) if dtype == contract.operand => String::new(),
            _ => format!(" of {}", contract.operand.name()),
        };
        operand + &contract.describe_sum()
    }

    fn event(&self, event: &Event) -> String {
        match *event {
            Event::Drained(stream) => {
                format!("all {}", self.role.stream(stream).name(&self.role.mesh))
            }
            Event::Done {
                template,
                instruction,
                which,
            } => {
                let which = match which {
                    Which::Latest => String::new(),
                    Which::Back(0) => ":m".into(),
                    Which::Back(n) => format!(":m-{n}"),
                };
                format!("{instruction} of {}{which}", self.template(template))
            }
        }
    }

    fn operation(&self, kind: &InstrKind) -> String {
        match kind {
            InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } => {
                let mut line = kind.name().to_string();
                if let (_, Some(given)) = attributes::split(kind) {
                    line.push(' ');
                    attributes::write(&given, &mut line);
                }
                for (sign, buffers) in [("", inputs), (" ->", outputs)] {
                    if !buffers.is_empty() {
                        let _ = write!(line, "{sign} {}", list(buffers));
                    }
                }
                line + " @ " + &name(path)
            }
            InstrKind::Collective {
                kind,
                axes,
                contract,
                items,
            } => {
                let reduction = match kind {
                    CollectiveKind::AllReduce(r) | CollectiveKind::ReduceScatter(r) => {
                        format!(" {}", word_of(*r, &reductions()))
                    }
                    CollectiveKind::AllGather
                    | CollectiveKind::AllToAll
                    | CollectiveKind::Shift => String::new(),
                };
                let item = |i: &CollectiveItem| match (kind, &i.step) {
                    (CollectiveKind::AllGather, LayoutStep::AllReduce { .. }) => {
                        format!("{} -> {} {MEMBERS}", i.input, i.output)
                    }
                    _ => moved(i.input, i.output, &i.step),
                };
                let first = items.first().map(|i| i.input);
                let items = items.iter().map(item);
                let (name, over, items) = (kind.name(), self.over(axes), list(items));
                let contract = self.contract(contract, first);
                format!("{name}{reduction}{contract}{over}: {items}")
            }
            InstrKind::Slice {
                step,
                input,
                output,
            } => {
                let over = self.over(&step.axes());
                format!("{SLICE}{over}: {}", moved(*input, *output, step))
            }
            InstrKind::Exchange { sends, recvs } => {
                let mut line = "exchange".to_string();
                for (word, moved, sent) in [("send", sends, true), ("receive", recvs, false)] {
                    if !moved.is_empty() {
                        let peers = |x| self.peers(x, sent).unwrap_or_default();
                        let moved = moved.iter().map(|(x, b)| format!("{x} {b}{}", peers(*x)));
                        let _ = write!(line, " {word} {}", list(moved));
                    }
                }
                line
            }
            InstrKind::WorldSum { inputs, output } => {
                let inputs = inputs.iter().map(|(entry, b)| format!("#{entry} {b}"));
                let space = if inputs.len() == 0 { "" } else { " " };
                format!("world_sum{space}{} -> {output}", list(inputs))
            }
            InstrKind::Load { kind, output } => {
                let (name, by) = input_name(*kind);
                let by = by.map_or(String::new(), |by| format!(" {by}"));
                format!("load {name}{by} -> {output}")
            }
            InstrKind::Fill { value, output } => format!("fill {value:?} -> {output}"),
            InstrKind::Copy { input, output } => format!("copy {input} -> {output}"),
        }
    }

    /// ` over x+y`, the first varying slowest, and who that is.
    fn over(&self, axes: &[AxisId]) -> String {
        let name = |a: &AxisId| self.role.mesh.axes.get(a.index()).map_or("?", |a| &a.name);
        let names: Vec<&str> = axes.iter().map(name).collect();
        format!(" over {}{}", names.join("+"), self.group(axes))
    }
}

/// `buf1 -> buf2 (dim 0)`: what a layout step does to which dims, and how.
fn moved(input: BufferId, output: BufferId, step: &LayoutStep) -> String {
    let (dims, unit) = match step {
        LayoutStep::AllReduce { .. } => return format!("{input} -> {output}"),
        LayoutStep::AllGather { dim, .. } => (dim.to_string(), 1),
        LayoutStep::ReduceScatter { dim, unit, .. } | LayoutStep::Slice { dim, unit, .. } => {
            (dim.to_string(), *unit)
        }
        LayoutStep::AllToAll { from, to, unit, .. } => (format!("{from} to {to}"), *unit),
        LayoutStep::Shift { dim, turns, .. } => (format!("{dim} turns {turns}"), 1),
    };
    let unit = match unit {
        1 => String::new(),
        _ => format!(" unit {unit}"),
    };
    format!("{input} -> {output} (dim {dims}{unit})")
}

impl Parser<'_> {
    /// The line of instruction `id`.
    pub(super) fn instruction(
        &mut self,
        id: usize,
        role: &RoleProgram,
    ) -> Result<Instruction, ParseError> {
        self.numbered("i", id)?;
        let kind = self.operation(role)?;
        self.s.expect("[")?;
        let stream = self.stream_of(role)?;
        let pass = self.s.choice("the pass", &PASSES)?;
        let layer = match self.s.peek_word().starts_with("layer") {
            true => Some(LayerId(self.id("layer", "a layer", usize::MAX)?)),
            false => None,
        };
        let call = if self.s.eat_word("chained") {
            Call::Chained {
                is_kept: self.s.eat_word("kept"),
            }
        } else if self.s.eat_word("joined") {
            Call::Joined
        } else {
            Call::Own
        };
        let (mut deps, mut events) = (vec![], vec![]);
        if self.s.eat_word("after") {
            self.commas(|p| p.wait(id, role, &mut deps, &mut events))?;
        }
        self.s.expect("]")?;
        Ok(Instruction {
            kind,
            stream,
            deps,
            events,
            pass,
            layer,
            call,
        })
    }

    /// One thing that instruction `id` waits for.
    fn wait(
        &mut self,
        id: usize,
        role: &RoleProgram,
        deps: &mut Vec<InstrId>,
        events: &mut Vec<Event>,
    ) -> Result<(), ParseError> {
        if self.s.eat_word("all") {
            events.push(Event::Drained(self.stream_of(role)?));
            return Ok(());
        }
        let start = self.s.token_start();
        let instruction =
            InstrId(self.id("i", "an instruction or `all` and a stream", usize::MAX)?);
        let place = start..self.s.token_end();
        if !self.s.eat_word("of") {
            deps.push(instruction);
            if instruction.index() < id {
                return Ok(());
            }
            let mut error = self
                .s
                .error(place, format!("{instruction} does not come before i{id}"));
            error.help = Some(format!(
                "an instruction of an earlier slot has its template, as in `{instruction} of F1:m`"
            ));
            return Err(error);
        }
        let (kind, template) = self.template_id()?;
        let which = match self.s.eat(":") {
            false => Which::Latest,
            true => {
                self.s.expect_word("m")?;
                Which::Back(match self.s.eat("-") {
                    true => self.s.number("how many microbatches before")?,
                    false => 0,
                })
            }
        };
        events.push(Event::Done {
            template,
            instruction,
            which,
        });
        let place = place.start..self.s.token_end();
        self.awaited.push((place, kind, template, instruction));
        Ok(())
    }

    fn operation(&mut self, role: &RoleProgram) -> Result<InstrKind, ParseError> {
        let start = self.s.token_start();
        let name = self.s.word("the name of an operation")?;
        Ok(match name {
            "all_reduce" | "reduce_scatter" | "all_gather" | "all_to_all" | "shift" => {
                let kind = match name {
                    "all_gather" => CollectiveKind::AllGather,
                    "all_to_all" => CollectiveKind::AllToAll,
                    "shift" => CollectiveKind::Shift,
                    _ => {
                        let reduction = self.s.choice("the reduction", &reductions())?;
                        match name {
                            "all_reduce" => CollectiveKind::AllReduce(reduction),
                            _ => CollectiveKind::ReduceScatter(reduction),
                        }
                    }
                };
                let (operand, sum) = self.contract()?;
                let axes = self.over(role)?;
                let items = self.commas(|p| p.item(name, &axes, role))?;
                let operand = operand.unwrap_or(role.buffer(items[0].input).dtype);
                InstrKind::Collective {
                    kind,
                    axes,
                    contract: Contract { operand, sum },
                    items,
                }
            }
            SLICE => {
                let axes = self.over(role)?;
                let CollectiveItem {
                    step,
                    input,
                    output,
                } = self.item(name, &axes, role)?;
                InstrKind::Slice {
                    step,
                    input,
                    output,
                }
            }
            "exchange" => {
                let mut moved = [vec![], vec![]];
                for (word, list) in ["send", "receive"].iter().zip(&mut moved) {
                    if self.s.eat_word(word) {
                        *list = self.commas(|p| {
                            let x = TransferId(p.id("x", "a transfer", p.n_transfers)?);
                            Ok((x, p.buffer(role)?))
                        })?;
                    }
                }
                let [sends, recvs] = moved;
                InstrKind::Exchange { sends, recvs }
            }
            "world_sum" => {
                let mut inputs = vec![];
                if self.s.peek() == Some('#') {
                    inputs = self.commas(|p| {
                        p.s.expect("#")?;
                        Ok((p.s.number("the number of an entry")?, p.buffer(role)?))
                    })?;
                }
                let output = self.result(role)?;
                InstrKind::WorldSum { inputs, output }
            }
            "load" => {
                let mut kind = self.s.choice("what is loaded", &INPUTS)?;
                if let InputKind::FurtherTokens { by } | InputKind::FurtherLabels { by } = &mut kind
                {
                    *by = self.s.number("how far on it is")?;
                }
                let output = self.result(role)?;
                InstrKind::Load { kind, output }
            }
            "fill" => {
                let value = self.s.json_number()?.as_f64().unwrap_or_default();
                let output = self.result(role)?;
                InstrKind::Fill { value, output }
            }
            "copy" => InstrKind::Copy {
                input: self.buffer(role)?,
                output: self.result(role)?,
            },
            _ => {
                let given = match self.s.peek() {
                    Some('{') => Some(attributes::read(&mut self.s)?),
                    _ => None,
                };
                let kind = attributes::join(name, given.as_ref()).map_err(|(message, help)| {
                    let error = self.s.error(start..self.s.token_end(), message);
                    ParseError { help, ..error }
                })?;
                let inputs = match self.s.peek_word().starts_with("buf") {
                    true => self.commas(|p| p.buffer(role))?,
                    false => vec![],
                };
                let outputs = match self.s.eat("->") {
                    true => self.commas(|p| p.buffer(role))?,
                    false => vec![],
                };
                self.s.expect("@")?;
                let path = self.name()?;
                InstrKind::Compute {
                    path,
                    kind,
                    inputs,
                    outputs,
                }
            }
        })
    }

    /// `of bf16 in f32 fixed`: the operands' type, where it is not that of their buffers, and the
    /// sum, where the collective adds.
    fn contract(&mut self) -> Result<(Option<DType>, Option<Sum>), ParseError> {
        let operand = match self.s.eat_word("of") {
            true => Some(self.s.dtype()?),
            false => None,
        };
        if !self.s.eat_word("in") {
            return Ok((operand, None));
        }
        let dtype = self.s.dtype()?;
        let orders = Order::ALL.map(|o| (o, o.name()));
        let order = self.s.choice("the order", &orders)?;
        Ok((operand, Some(Sum { dtype, order })))
    }
    /// `over x+y:`.
    fn over(&mut self, role: &RoleProgram) -> Result<Vec<AxisId>, ParseError> {
        self.s.expect_word("over")?;
        let axes = self.axes(&role.mesh)?;
        self.s.expect(":")?;
        Ok(axes)
    }
    /// `-> buf4`.
    fn result(&mut self, role: &RoleProgram) -> Result<BufferId, ParseError> {
        self.s.expect("->")?;
        self.buffer(role)
    }
    /// `buf3 -> buf4 (dim 1)`: a layout step of this name over these axes.
    fn item(
        &mut self,
        name: &str,
        axes: &[AxisId],
        role: &RoleProgram,
    ) -> Result<CollectiveItem, ParseError> {
        let (input, output) = (self.buffer(role)?, self.result(role)?);
        let gathers_members = name == "all_gather" && self.s.eat(MEMBERS);
        let step = match *axes {
            _ if name == "all_reduce" || gathers_members => LayoutStep::AllReduce {
                axes: axes.to_vec(),
            },
            [axis] => {
                self.s.expect("(")?;
                self.s.expect_word("dim")?;
                let (dim, mut to, mut unit) = (self.s.number("a dim")?, 0, 1);
                let mut turns = 0;
                if name == "shift" {
                    self.s.expect_word("turns")?;
                    turns = self.s.number("how many places")?;
                }
                if name == "all_to_all" {
                    self.s.expect_word("to")?;
                    to = self.s.number("a dim")?;
                }
                if !matches!(name, "all_gather" | "shift") && self.s.eat_word("unit") {
                    unit = self.s.number("the unit")?;
                }
                self.s.expect(")")?;
                match name {
                    "reduce_scatter" => LayoutStep::ReduceScatter { axis, dim, unit },
                    "all_gather" => LayoutStep::AllGather { axis, dim },
                    "shift" => LayoutStep::Shift { axis, dim, turns },
                    "all_to_all" => LayoutStep::AllToAll {
                        axis,
                        from: dim,
                        to,
                        unit,
                    },
                    _ => LayoutStep::Slice { axis, dim, unit },
                }
            }
            _ => {
                let what = format!("`{name}` goes over one axis, not {}", axes.len());
                return Err(self.s.error_here(what));
            }
        };
        Ok(CollectiveItem {
            step,
            input,
            output,
        })
    }
}
