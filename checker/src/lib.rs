//! The referee: proves a plan, and the program lowered from it, from the forward graph alone.
//!
//! It knows the language (`ir`) and neither the search nor the lowering. A program is correct
//! when its ranks compute, for every operand of every op, exactly the value the training
//! graph names, in a layout the op's sharding rule allows; when memory holds it, messages
//! meet, nothing waits for ever, and every order that the streams permit gives the same. The
//! model is regalloc2's checker: an abstract interpretation over *which value stands where*,
//! that never asks how the decision was made.
//!
//! **Lattice** (`walk`). For every copy of every buffer:
//!
//! ```text
//!            Poison            something wrong was reported; says nothing more
//!     /     |      |     \
//!  Value  Filled  Sum   World  a value of the training graph under a spec; a number; a sum
//!     \     |      |     /     over a set of microbatches; the vector of a world sum. And Part:
//!      \    |      |    /      what some parts of a chain around a ring give of a value
//!          Undefined
//! ```
//!
//! A value of a microbatch region carries its microbatch; a copy that holds another
//! microbatch's value is undefined to its reader. Values that `Layout` ops join are one
//! value, as are all inputs of one kind. The spec is the buffer's own: values are made
//! in it; an all-reduce in place leaves it with fewer partial axes.
//!
//! **Transfer functions.** `Compute`: the op of that path with the same attributes; operands
//! hold its operands, and *some* use of each mesh axis that the rule allows gives all specs
//! at once (`consistency`); the results then hold its results. A part of an attention whose keys go
//! around a ring goes on with what the parts before it gave (`walk::template::ring`). Layout changes: the value
//! stays, the spec becomes what `LayoutStep::apply` says; collectives find their operands and
//! leave their results in the pieces that they move (`pieces`). `Accumulate` adds the microbatch to
//! the set; a sum is a value once the set is complete. A receive holds the value that its
//! transfer names, which the sender has to hold: matching sends to receives closes the
//! induction. Writing a buffer undefines whatever else lies on its bytes; transient buffers
//! are undefined when their template ends.
//!
//! **Per step.** At the start the persistent buffers hold the states' old values, at the end
//! they must hold the new ones under the same spec; so one step proves all.
//!
//! **Versions.** Where every microbatch updates the states, the version that it has of one is a
//! value of its own, which moving the state in its forward pass makes: an op of its backward pass
//! that reads the state, or another microbatch's version, reads a wrong value. When the slot of an
//! update ends the state's buffer holds the state again, a newer one, and copies of it elsewhere
//! hold nothing. Each microbatch updates every state once, in order.
//!
//! **Many microbatches.** What a template does depends on what the buffers it touches hold on
//! entry, seen relative to the microbatch played. So a template is interpreted once for each
//! such entry state and replayed otherwise; the trace is always walked in full.
//!
//! **Streams and deadlock.** Playing the trace serially under rendezvous is simulated
//! exactly (`rendezvous`). Every wait of the stream semantics is for something earlier in
//! the same role's list, given that deps and events point backwards; so what cannot hang
//! serially cannot hang with streams, as every communicator has a stream of its own and so the
//! same order on all its members. And what the streams may reorder has no conflicting accesses,
//! by buffer and by byte, inside a slot and between slots (`hazards`). What exchanges touch is
//! ordered by buffer, so its bytes must be nobody else's (`memory`).
//!
//! **Calls.** Neighbours that a device may make one call of (`calls`) are played one by one here.
//! That one call computes the same, but for the rounding of what it does not write, follows from rules
//! of their own: what it writes it does not read, and what it does not write nobody else sees.
//!
//! **Not proved:** that kernels compute what their op says, that a sharding rule is sound
//! (both are the runtime's differential tests), that predictions are right, or that the plan
//! is good. Ops whose results nothing uses need not run.

mod calls;
mod consistency;
mod contracts;
mod coverage;
mod facts;
mod hazards;
mod memory;
mod pieces;
mod plan;
mod ranges;
mod rendezvous;
mod report;
mod side_by_side;
mod structure;
#[cfg(test)]
mod tests;
mod transfers;
mod walk;

pub use plan::check_plan;
pub use report::Violation;

use facts::Facts;
use ir::plan::Plan;
use ir::program::Program;
use ir::training::TrainingGraph;
use report::Report;

/// Lists everything that is wrong with a program of `plan`; an empty list proves it correct.
///
/// `training` is the plan's training graph; the plan is taken to be one ([`check_plan`]).
/// Never panics and needs memory in proportion to the program. A program whose indices or
/// sizes make no sense is reported as that alone.
pub fn check_program(plan: &Plan, training: &TrainingGraph, program: &Program) -> Vec<Violation> {
    let mut report = Report::default();
    let Some(facts) = Facts::new(training, program.microbatch, &mut report) else {
        return report.finish();
    };
    structure::check(plan, &facts, program, &mut report);
    if !report.is_empty() {
        return report.finish();
    }
    // Hazards and what copies hold take longest, and ask their roles side by side too.
    let questions: [&(dyn Fn(&mut Report) + Sync); 9] = [
        &|report| memory::check(plan, program, report),
        &|report| pieces::check(program, report),
        &|report| contracts::check(plan, program, report),
        &|report| calls::check(program, report),
        &|report| hazards::check(program, report),
        &|report| transfers::check(&facts, program, report),
        &|report| walk::check(&facts, program, report),
        &|report| coverage::check(&facts, program, report),
        &|report| rendezvous::check(&facts, program, report),
    ];
    side_by_side::each(questions.len(), &mut report, |i, own| questions[i](own));
    report.finish()
}
