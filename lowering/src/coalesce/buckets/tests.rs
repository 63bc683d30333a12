use super::*;
use crate::bucket::BucketSizes;
use crate::draft::DraftBuffer;
use ir::StreamId;
use ir::program::{CollectiveItem, Template};
use ir::reshard::LayoutStep;
use ir::{
    Axis, AxisId, BufferId, DType, DeviceMesh, LayerId, LogicalMesh, Pass, Rank, Reduction, Region,
    ShardingSpec, StageId,
};

/// Elements of f32 tensors of 1, 10 and 25 MiB.
const SMALL: u64 = 1 << 18;
const MIDDLE: u64 = 10 << 18;
const LARGE: u64 = 25 << 18;

fn mesh() -> LogicalMesh {
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 2,
    };
    let axis = Axis {
        name: "x".into(),
        size: 2,
    };
    LogicalMesh::new(devices, vec![axis]).expect("2 = 2")
}

/// A backward that is written by hand. Buffers have the names that they get when they are
/// first used.
struct Backward {
    role: RoleDraft,
    instructions: Vec<Instruction>,
}

impl Backward {
    fn new() -> Self {
        Backward {
            role: RoleDraft::new(StageId::new(0), mesh()),
            instructions: Vec::new(),
        }
    }
    fn buffer(&mut self, name: &str, elements: u64, lifetime: Lifetime) -> BufferId {
        let known = self.role.buffers.iter().position(|b| b.name == name);
        known.map(BufferId::new).unwrap_or_else(|| {
            self.role.add_buffer(DraftBuffer {
                name: name.into(),
                dtype: DType::F32,
                lens: vec![elements],
                spec: ShardingSpec::replicated(1),
                pieces: None,
                lifetime,
                value: None,
                space: ir::program::Space::Device,
            })
        })
    }
    fn push(&mut self, kind: InstrKind) {
        self.instructions.push(instruction(kind));
    }
    /// An op whose result other ops need.
    fn op(&mut self, input: &str, output: &str) {
        let (input, output) = (
            self.buffer(input, SMALL, Lifetime::ByUse),
            self.buffer(output, SMALL, Lifetime::ByUse),
        );
        self.push(InstrKind::Compute {
            path: String::new(),
            kind: OpKind::Transpose { perm: vec![0] },
            inputs: vec![input],
            outputs: vec![output],
        });
    }
    fn collective(&mut self, kind: CollectiveKind, input: BufferId, output: BufferId) {
        let axes = vec![AxisId::new(0)];
        let step = LayoutStep::AllReduce { axes: axes.clone() };
        self.push(InstrKind::Collective {
            contract: ir::Contract::new(kind, ir::DType::F32, ir::Order::Fixed),
            kind,
            axes,
            items: vec![CollectiveItem {
                step,
                input,
                output,
            }],
        });
    }
    /// Makes a gradient from `x`, reduces it in place and adds it to its accumulator.
    fn gradient(&mut self, name: &str, elements: u64) {
        let gradient = self.buffer(name, elements, Lifetime::ByUse);
        self.op("x", name);
        self.reduce(gradient);
        let sum = self.buffer(&format!("sum {name}"), elements, Lifetime::Accumulator);
        self.push(InstrKind::Compute {
            path: String::new(),
            kind: OpKind::Accumulate { dtype: DType::F32 },
            inputs: vec![gradient],
            outputs: vec![sum],
        });
    }
    fn reduce(&mut self, b: BufferId) {
        self.collective(CollectiveKind::AllReduce(Reduction::Sum), b, b);
    }
    /// Gathers a parameter and uses it.
    fn parameter(&mut self, name: &str, elements: u64) {
        let shard = self.buffer(&format!("{name} shard"), elements, Lifetime::Persistent);
        let whole = self.buffer(name, elements, Lifetime::ByUse);
        self.collective(CollectiveKind::AllGather, shard, whole);
        self.op(name, &format!("{name} used"));
    }
    /// The instructions with their buckets, a word each.
    fn filled(mut self) -> String {
        self.role.templates.push(Template {
            kind: TemplateKind::Backward,
            chunk: 0,
            instructions: self.instructions,
        });
        super::super::coalesce(&mut self.role, &BucketSizes::default());
        let name = |b: BufferId| self.role.buffers[b.index()].name.clone();
        let one = |i: &Instruction| match &i.kind {
            InstrKind::Compute { kind, outputs, .. } => match kind {
                OpKind::Accumulate { .. } => format!("+={}", &name(outputs[0])[4..]),
                _ => name(outputs[0]),
            },
            InstrKind::Collective { kind, items, .. } => {
                let names: Vec<String> = items.iter().map(|i| name(i.output)).collect();
                format!("{}[{}]", kind.name(), names.join(" "))
            }
            other => panic!("{other:?} is not made here"),
        };
        let words: Vec<String> = self.role.templates[0]
            .instructions
            .iter()
            .map(one)
            .collect();
        words.join(" ")
    }
}

fn instruction(kind: InstrKind) -> Instruction {
    Instruction {
        kind,
        stream: StreamId(0),
        deps: vec![],
        events: vec![],
        pass: Pass::BW,
        layer: Some(LayerId(0)),
        call: ir::program::Call::Own,
    }
}

#[test]
fn a_bucket_is_sent_when_it_is_full_and_read_when_the_next_one_is() {
    let mut b = Backward::new();
    for name in ["a", "b", "c", "d", "e", "f", "g"] {
        b.gradient(name, MIDDLE);
    }
    assert_eq!(
        b.filled(),
        "a b c all_reduce[a b c] d e f +=a +=b +=c all_reduce[d e f] g +=d +=e +=f \
         all_reduce[g] +=g"
    );
}

#[test]
fn small_gradients_travel_with_the_large_one_that_fills_their_bucket() {
    let mut b = Backward::new();
    b.gradient("a", SMALL);
    b.gradient("b", LARGE);
    b.gradient("c", SMALL);
    assert_eq!(
        b.filled(),
        "a b all_reduce[a b] c +=a +=b all_reduce[c] +=c"
    );
}

#[test]
fn what_the_template_needs_is_reduced_where_it_stands() {
    let mut b = Backward::new();
    b.gradient("a", SMALL);
    b.op("x", "y");
    let y = b.buffer("y", SMALL, Lifetime::ByUse);
    b.reduce(y);
    b.op("y", "z");
    b.gradient("b", SMALL);
    assert_eq!(b.filled(), "a y all_reduce[y] z b all_reduce[a b] +=a +=b");
}

#[test]
fn what_another_template_reads_is_reduced_where_it_stands() {
    let mut b = Backward::new();
    b.gradient("a", SMALL);
    let kept = b.buffer("kept", SMALL, Lifetime::Kept);
    b.op("x", "kept");
    b.reduce(kept);
    b.gradient("b", SMALL);
    assert_eq!(
        b.filled(),
        "a kept all_reduce[kept] b all_reduce[a b] +=a +=b"
    );
}

#[test]
fn a_second_reduction_of_a_gradient_follows_the_first() {
    // Over pieces first, then whole: the second one waits for a bucket of its own.
    let mut b = Backward::new();
    for name in ["a", "b"] {
        let piece = format!("{name} piece");
        let (whole, part) = (
            b.buffer(name, MIDDLE, Lifetime::ByUse),
            b.buffer(&piece, MIDDLE, Lifetime::ByUse),
        );
        b.op("x", name);
        b.collective(CollectiveKind::ReduceScatter(Reduction::Sum), whole, part);
        b.reduce(part);
    }
    assert_eq!(
        b.filled(),
        "a b reduce_scatter[a piece b piece] all_reduce[a piece b piece]"
    );
}

#[test]
fn neighbours_merge_if_they_are_independent() {
    let mut b = Backward::new();
    for name in ["a", "b", "c"] {
        b.buffer(name, SMALL, Lifetime::Kept);
    }
    let all: Vec<BufferId> = (0..3).map(BufferId::new).collect();
    b.reduce(all[0]);
    b.reduce(all[1]);
    b.op("b", "c");
    b.reduce(all[2]);
    b.reduce(all[2]);
    assert_eq!(b.filled(), "all_reduce[a b] c all_reduce[c] all_reduce[c]");
}

#[test]
fn parameters_are_gathered_one_bucket_ahead() {
    let mut b = Backward::new();
    for name in ["a", "b", "c", "d", "e"] {
        b.parameter(name, MIDDLE);
    }
    b.parameter("f", LARGE);
    b.parameter("g", SMALL);
    // Two of ten to a bucket. The large one fills its own and stays where it is used; the small
    // one joins `e`.
    assert_eq!(
        b.filled(),
        "all_gather[a b] all_gather[c d] a used b used all_gather[e g] c used d used e used \
         all_gather[f] f used g used"
    );
}

#[test]
fn what_microbatches_write_is_gathered_where_it_stands() {
    let mut b = Backward::new();
    b.parameter("a", SMALL);
    b.op("x", "y");
    let (y, whole) = (
        b.buffer("y", SMALL, Lifetime::ByUse),
        b.buffer("whole", SMALL, Lifetime::ByUse),
    );
    b.collective(CollectiveKind::AllGather, y, whole);
    b.parameter("b", SMALL);
    assert_eq!(
        b.filled(),
        "all_gather[a b] a used y all_gather[whole] b used"
    );
}

#[test]
fn many_ranks_fill_larger_buckets() {
    for (n_ranks, mib) in [(2, 25), (25, 25), (26, 26), (512, 512)] {
        let bytes = BucketSizes::default().full(Region::Microbatch, n_ranks);
        assert_eq!(bytes, mib << 20, "{n_ranks} ranks");
    }
    assert_eq!(BucketSizes::default().full(Region::StepEnd, 64), 256 << 20);
    assert_eq!(BucketSizes::default().full(Region::StepEnd, 512), 2 << 30);
}
