//! Accumulators that need not be cleared.

use super::*;
use crate::execute::calls::tests::{self, dot, gelu, instruction, op, role};
use ir::program::{Call, Stream, Template};

/// By slot, which steps are spared, and which begin a chain that comes to zeros: a template that is
/// played first, and one that two microbatches play.
fn spared(begin: &[Instruction], forward: &[Instruction]) -> [Vec<Vec<bool>>; 2] {
    let mut role = role(&(0..16).map(|i| 256 * i).collect::<Vec<_>>());
    role.streams = vec![Stream::Kernels];
    for buffer in &mut role.buffers[12..] {
        buffer.class = BufferClass::Transient;
    }
    let template = |kind, instructions: &[Instruction]| Template {
        kind,
        chunk: 0,
        instructions: instructions.to_vec(),
    };
    role.templates = vec![
        template(TemplateKind::StepBegin, begin),
        template(TemplateKind::Forward, forward),
    ];
    let slot = |template: u32, microbatch: Option<u32>| ScriptSlot {
        template: TemplateId(template),
        microbatch,
        instructions: (0..role.templates[template as usize].instructions.len()).collect(),
    };
    let slots = vec![slot(0, None), slot(1, Some(0)), slot(1, Some(1))];
    let script = Script::new(&role, slots);
    let of = |seen: fn(&Step) -> bool| {
        let slots = script.slots.iter();
        slots.map(|s| s.iter().map(seen).collect()).collect()
    };
    [of(|s| s.is_spared), of(|s| s.is_cleared)]
}

/// A sum in an accumulator, which is in the call of the product before it or in its own.
fn accumulate(x: u32, y: u32, is_chained: bool) -> Instruction {
    let chained = Call::Chained { is_kept: false };
    let call = if is_chained { chained } else { Call::Own };
    tests::accumulate(x, y, call)
}

fn fill(value: f64, b: u32) -> Instruction {
    let output = BufferId(b);
    instruction(InstrKind::Fill { value, output }, Call::Own)
}

#[test]
fn the_first_sum_in_an_accumulator_spares_its_zeros() {
    let chain = || vec![dot(0, 1, 12), accumulate(12, 2, true)];
    let no = || vec![vec![false], vec![false; 2], vec![false; 2]];
    let mut first = no();
    first[0][0] = true;
    let mut cleared = no();
    cleared[1][0] = true;
    assert_eq!(spared(&[fill(0.0, 2)], &chain()), [first, cleared]);
    // Another number, and another buffer.
    assert_eq!(spared(&[fill(1.0, 2)], &chain()), [no(), no()]);
    assert_eq!(spared(&[fill(0.0, 3)], &chain()), [no(), no()]);
    // A sum that is no part of a chain adds to the zeros.
    let alone = [gelu(0, 12), accumulate(12, 2, false)];
    assert_eq!(spared(&[fill(0.0, 2)], &alone), [no(), no()]);
    // Somebody reads or writes them first.
    for between in [
        gelu(2, 13),
        gelu(3, 2),
        accumulate(3, 2, false),
        fill(1.0, 2),
    ] {
        let begin = [fill(0.0, 2), between];
        let none = vec![vec![false; 2]; 3];
        assert_eq!(spared(&begin, &chain()), [none.clone(), none]);
    }
    let other = op(OpKind::SumSquares, 4, 5);
    let [seen, _] = spared(&[fill(0.0, 2), other], &chain());
    assert_eq!(seen[0], [true, false]);
}
