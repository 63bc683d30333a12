//! Printing.

use super::fold::{Item, Line, Numbered, Operand, Run};
use super::{PASSES, REGIONS, attributes, fold, word_of};
use crate::{Graph, LayerId, Op, Origin, ValueId};
use std::fmt::Write;

/// From this many on, layer names that differ in a number are written as one.
const MIN_NAMES: usize = 3;

/// The text form of a graph; see the module header.
pub fn print(graph: &Graph) -> String {
    let mut out = format!("graph {} {{\n", attributes::quote(&graph.name));
    print_layers(&graph.layers, &mut out);
    for item in fold::items(graph) {
        match item {
            Item::Ops(ops) => graph.ops()[ops]
                .iter()
                .for_each(|op| print_op(graph, op, &mut out)),
            Item::Run(run) => print_run(graph, &run, &mut out),
        }
    }
    if !graph.outputs.is_empty() {
        let _ = writeln!(out, "  return {}", values(&graph.outputs));
    }
    out.push_str("}\n");
    out
}

fn print_layers(names: &[String], out: &mut String) {
    let (mut written, mut i) = (Vec::new(), 0);
    while i < names.len() {
        let row = names
            .get(i + 1)
            .and_then(|next| Numbered::of(&names[i], next))
            .filter(|r| !r.down);
        let n = row.as_ref().map_or(0, |r| r.count(&names[i..]));
        match row {
            Some(row) if n >= MIN_NAMES => {
                let last = row.from as usize + n - 1;
                written.push(format!(
                    "{} from {} to {last}",
                    attributes::quote(&row.template()),
                    row.from
                ));
                i += n;
            }
            _ => {
                written.push(attributes::quote(&names[i]));
                i += 1;
            }
        }
    }
    if !written.is_empty() {
        let _ = writeln!(out, "  layers {}", written.join(", "));
    }
}

fn print_op(graph: &Graph, op: &Op, out: &mut String) {
    let (_, given) = attributes::split(&op.kind);
    let operands = fold::references(graph, op).map(Operand::Plain).collect();
    let line = Line {
        path: op.path.clone(),
        attributes: given,
        operands,
    };
    out.push_str("  ");
    print_line(graph, op, &line, out);
    match op.layer {
        Some(LayerId(n)) => {
            let _ = writeln!(out, " layer {n}");
        }
        None => out.push_str(" world\n"),
    }
}

fn print_run(graph: &Graph, run: &Run, out: &mut String) {
    let name = attributes::quote(&run.names.template());
    let _ = write!(out, "  repeat {} as {name} from {}", run.n, run.names.from);
    if run.names.down {
        out.push_str(" down");
    }
    if !run.carried.is_empty() {
        let pairs = run.carried.iter().enumerate();
        let pairs: Vec<String> = pairs
            .map(|(i, (a, b))| format!("%prev{i} = {a} then {b}"))
            .collect();
        let _ = write!(out, " ({})", pairs.join(", "));
    }
    out.push_str(" {\n");
    for (op, line) in graph.ops()[run.body.clone()].iter().zip(&run.lines) {
        out.push_str("    ");
        print_line(graph, op, line, out);
        out.push('\n');
    }
    out.push_str("  }\n");
}

/// Everything of a line but the layer.
fn print_line(graph: &Graph, op: &Op, line: &Line, out: &mut String) {
    let _ = write!(out, "{} = {}", values(&op.outputs), op.kind.name());
    if let Some(given) = &line.attributes {
        out.push(' ');
        attributes::write(given, out);
    }
    let (operands, of) = line.operands.split_at(op.inputs.len());
    for (i, operand) in operands.iter().enumerate() {
        out.push_str(if i == 0 { " " } else { ", " });
        print_operand(operand, out);
    }
    let types: Vec<String> = op
        .outputs
        .iter()
        .map(|&v| graph.ty(v).to_string())
        .collect();
    let (pass, region) = (word_of(op.pass, &PASSES), word_of(op.region, &REGIONS));
    let _ = write!(
        out,
        " : {} @ {} {pass} {region}",
        types.join(", "),
        line.path
    );
    if op.origin != Origin::Forward {
        let (name, number) = op.origin.name();
        let _ = write!(out, " {name}");
        let _ = number.map(|n| write!(out, " {n}"));
    }
    for operand in of {
        out.push_str(" of ");
        print_operand(operand, out);
    }
}

fn print_operand(operand: &Operand, out: &mut String) {
    let _ = match operand {
        Operand::Plain(v) => write!(out, "{v}"),
        Operand::Strided(v, stride) => write!(out, "{v}[{stride:+}]"),
        Operand::Carried(i) => write!(out, "%prev{i}"),
    };
}

fn values(ids: &[ValueId]) -> String {
    ids.iter()
        .map(ValueId::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}
