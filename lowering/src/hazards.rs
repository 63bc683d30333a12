//! Dependencies between the streams of a template.
//!
//! An instruction waits for the last write of what it reads, and for the last write of and
//! the reads since from what it writes; buffers count as one where their bytes overlap.
//! Stream order already orders instructions of one stream. A vector clock (per instruction,
//! the last instruction of every stream that is known to be complete when it starts) leaves
//! out what follows from other dependencies.

use ir::program::{Buffer, BufferClass, Instruction, Stream, Template};
use ir::{BufferId, InstrId};

const N_STREAMS: usize = 3;

fn index(stream: Stream) -> usize {
    match stream {
        Stream::Compute => 0,
        Stream::Collective => 1,
        Stream::Transfer => 2,
    }
}

/// By stream, one past the position of an instruction; 0 for none.
type Clock = [usize; N_STREAMS];

fn join(a: &mut Clock, b: &Clock) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b));
}

/// What a buffer's next access may have to wait for.
#[derive(Clone, Copy, Default)]
struct Access {
    written: Clock,
    read: Clock,
}

/// What the buffers of a role were last accessed by, in the template at hand.
struct Accesses<'b> {
    buffers: &'b [Buffer],
    /// By buffer; `None` for those that the template has not touched so far.
    by_buffer: Vec<Option<Access>>,
    /// Bytes, from and to, of the transient buffers that it has touched.
    taken: Vec<(u64, u64, BufferId)>,
    /// All that it has touched.
    touched: Vec<BufferId>,
}

impl<'b> Accesses<'b> {
    fn new(buffers: &'b [Buffer]) -> Self {
        Accesses {
            buffers,
            by_buffer: vec![None; buffers.len()],
            taken: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// Forgets the template.
    fn clear(&mut self) {
        self.taken.clear();
        for b in self.touched.drain(..) {
            self.by_buffer[b.index()] = None;
        }
    }

    fn of(&mut self, b: BufferId) -> &mut Access {
        let access = &mut self.by_buffer[b.index()];
        if access.is_none() {
            self.touched.push(b);
            let buffer = &self.buffers[b.index()];
            if buffer.class == BufferClass::Transient {
                let end = buffer.offset + buffer.stride();
                self.taken.push((buffer.offset, end, b));
            }
        }
        access.get_or_insert_default()
    }

    /// A transient buffer's first access waits for all accesses of those whose bytes it takes.
    fn reused_bytes(&self, b: BufferId, wait: &mut Clock) {
        let own = &self.buffers[b.index()];
        if self.by_buffer[b.index()].is_some() || own.class != BufferClass::Transient {
            return;
        }
        let (from, to) = (own.offset, own.offset + own.stride());
        let others = self.taken.iter().filter(|t| from < t.1 && t.0 < to);
        for access in others.filter_map(|t| self.by_buffer[t.2.index()].as_ref()) {
            join(wait, &access.written);
            join(wait, &access.read);
        }
    }
}

/// Fills in the dependencies of the instructions of each template.
pub(crate) fn set_dependencies(templates: &mut [Template], buffers: &[Buffer]) {
    let mut accesses = Accesses::new(buffers);
    for template in templates {
        set_of_template(&mut template.instructions, &mut accesses);
        accesses.clear();
    }
}

fn set_of_template(instructions: &mut [Instruction], accesses: &mut Accesses<'_>) {
    let mut clocks: Vec<Clock> = Vec::with_capacity(instructions.len());
    let mut stream_clock = [[0; N_STREAMS]; N_STREAMS];
    for (i, instruction) in instructions.iter_mut().enumerate() {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let mut wait = Clock::default();
        for b in reads.iter().chain(&writes) {
            accesses.reused_bytes(*b, &mut wait);
        }
        for b in &reads {
            join(&mut wait, &accesses.of(*b).written);
        }
        for b in &writes {
            let access = accesses.of(*b);
            join(&mut wait, &access.written);
            join(&mut wait, &access.read);
        }
        let own = index(instruction.stream);
        let mut known = stream_clock[own];
        // Later instructions first: they may imply the earlier ones.
        let mut candidates: Vec<usize> = (0..N_STREAMS).filter(|&s| s != own).collect();
        candidates.sort_by_key(|&s| std::cmp::Reverse(wait[s]));
        instruction.deps.clear();
        for s in candidates {
            if wait[s] > known[s] {
                instruction.deps.push(InstrId::new(wait[s] - 1));
                join(&mut known, &clocks[wait[s] - 1]);
            }
        }
        instruction.deps.sort_unstable();
        known[own] = i + 1;
        clocks.push(known);
        stream_clock[own] = known;
        let mut at = Clock::default();
        at[own] = i + 1;
        for b in &reads {
            join(&mut accesses.of(*b).read, &at);
        }
        for b in &writes {
            *accesses.of(*b) = Access {
                written: at,
                read: Clock::default(),
            };
        }
    }
}
