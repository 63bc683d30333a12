//! The program that a calibration plays: operands being filled, and measured instructions.

use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::op::{Binary, Einsum, RopeScaling, Unary};
use ir::program::{
    ARENA_ALIGN, Buffer, BufferClass, CollectiveItem, InstrKind, Instruction, Program, RoleProgram,
    Slot, Stream, Template, TemplateKind,
};
use ir::reshard::LayoutStep;
use ir::{
    AxisId, BufferId, DType, DimSharding, Dims, LogicalMesh, OpKind, Pass, Rank, ReduceKind,
    Reduction, ShardingSpec, StageId, StreamId, TemplateId,
};

/// A measured instruction.
pub(super) struct Probe {
    pub what: String,
    pub size: Vec<u64>,
    pub place: Place,
}

/// The instruction that is timed for a probe, on every rank.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub template: usize,
    pub instruction: usize,
}

/// A program of one role and one template, under construction. Every probe's buffers begin at
/// the start of the arena again.
pub(super) struct ProgramOfProbes {
    role: RoleProgram,
    group: u32,
    probes: Vec<Probe>,
    next_offset: u64,
}

/// Axis 1 joins the group.
const GROUP: AxisId = AxisId(1);

impl ProgramOfProbes {
    /// `n_ranks` ranks in groups of `group`.
    pub(super) fn new(n_ranks: u32, group: u32) -> Self {
        let axes = vec![
            Axis {
                name: "groups".into(),
                size: n_ranks / group,
            },
            Axis {
                name: "members".into(),
                size: group,
            },
        ];
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: n_ranks,
        };
        let role = RoleProgram {
            stage: StageId(0),
            mesh: LogicalMesh { devices, axes },
            streams: vec![Stream::Kernels],
            buffers: Vec::new(),
            templates: vec![Template {
                kind: TemplateKind::Forward,
                chunk: 0,
                instructions: Vec::new(),
            }],
            trace: vec![Slot {
                template: TemplateId(0),
                microbatch: Some(0),
            }],
            arena_bytes: 0,
            other_arenas: Default::default(),
            states: Vec::new(),
            loss: None,
            grad_norm: None,
        };
        ProgramOfProbes {
            role,
            group,
            probes: Vec::new(),
            next_offset: 0,
        }
    }

    fn buffer(&mut self, dtype: DType, lens: &[u64], spec: ShardingSpec) -> BufferId {
        let bytes = spec.local_elements(lens, &self.role.mesh) * dtype.bytes();
        let buffer = Buffer {
            name: "probe".into(),
            dtype,
            lens: lens.to_vec(),
            spec,
            pieces: None,
            space: Default::default(),
            class: BufferClass::Transient,
            turns: None,
            offset: self.next_offset,
            bytes,
        };
        self.next_offset += buffer.stride().max(ARENA_ALIGN);
        self.role.arena_bytes = self.role.arena_bytes.max(self.next_offset);
        self.role.buffers.push(buffer);
        BufferId::new(self.role.buffers.len() - 1)
    }
    fn operand(&mut self, dtype: DType, lens: &[u64]) -> BufferId {
        let b = self.buffer(dtype, lens, ShardingSpec::replicated(lens.len()));
        let value = if dtype.is_float() { 0.5 } else { 0.0 };
        self.push(InstrKind::Fill { value, output: b });
        b
    }
    fn push(&mut self, kind: InstrKind) -> usize {
        let instructions = &mut self.role.templates[0].instructions;
        instructions.push(Instruction {
            kind,
            stream: StreamId(0),
            deps: vec![],
            events: vec![],
            pass: Pass::F,
            layer: None,
            call: ir::program::Call::Own,
        });
        instructions.len() - 1
    }
    fn probe(&mut self, what: impl Into<String>, size: Vec<u64>, kind: InstrKind) {
        let instruction = self.push(kind);
        self.probes.push(Probe {
            what: what.into(),
            size,
            place: Place {
                template: 0,
                instruction,
            },
        });
        self.next_offset = 0;
    }

    /// An op whose results lie apart from its operands, or over them where it updates.
    fn op(
        &mut self,
        kind: OpKind,
        operands: &[(DType, &[u64])],
        results: &[(DType, &[u64])],
        call: impl FnOnce(ir::op::Work) -> (String, Vec<u64>),
    ) {
        let inputs: Vec<BufferId> = operands
            .iter()
            .map(|(d, lens)| self.operand(*d, lens))
            .collect();
        let over = kind.in_place();
        let result = |this: &mut Self, i: usize| match over.iter().find(|p| p.1 == i) {
            Some(p) => inputs[p.0],
            None => this.buffer(
                results[i].0,
                results[i].1,
                ShardingSpec::replicated(results[i].1.len()),
            ),
        };
        let outputs = (0..results.len()).map(|i| result(self, i)).collect();
        let concrete =
            |ts: &[(DType, &[u64])]| ts.iter().map(|t| (t.0, t.1.to_vec())).collect::<Vec<_>>();
        let (what, size) = call(kind.work(&concrete(operands), &concrete(results)));
        self.probe(
            what,
            size,
            InstrKind::Compute {
                path: "probe".into(),
                kind,
                inputs,
                outputs,
            },
        );
    }

    fn matmul(
        &mut self,
        dtype: DType,
        einsum: &str,
        (m, n, k): (u64, u64, u64),
        what: String,
        size: Vec<u64>,
    ) {
        let einsum = Einsum::parse(einsum).expect("probes are valid einsums");
        let lens = |labels: &[u8]| {
            labels
                .iter()
                .map(|l| match l {
                    b'm' => m,
                    b'n' => n,
                    _ => k,
                })
                .collect::<Vec<u64>>()
        };
        let (lhs, rhs, out) = (lens(&einsum.lhs), lens(&einsum.rhs), lens(&einsum.out));
        self.op(
            OpKind::DotGeneral { einsum },
            &[(dtype, &lhs), (dtype, &rhs)],
            &[(dtype, &out)],
            |_| (what, size),
        );
    }

    pub(super) fn kernels(&mut self, quick: bool) {
        for _ in 0..8 {
            self.op(
                OpKind::Binary { f: Binary::Add },
                &[(DType::F32, &[16]), (DType::F32, &[16])],
                &[(DType::F32, &[16])],
                |_| ("launch".into(), vec![]),
            );
        }
        let squares: &[u64] = if quick {
            &[64, 256, 512]
        } else {
            &[32, 64, 128, 256, 512, 1024]
        };
        let mut shapes: Vec<(u64, u64, u64)> = squares.iter().map(|&s| (s, s, s)).collect();
        shapes.extend([(16, 512, 512), (512, 16, 512), (512, 512, 16)]);
        if !quick {
            shapes.extend([
                (64, 512, 512),
                (512, 64, 512),
                (512, 512, 64),
                (128, 2048, 512),
                (2048, 128, 512),
                (256, 768, 2048),
                (4, 1024, 1024),
                (1024, 4096, 256),
            ]);
        }
        for (m, n, k) in shapes {
            // As in a forward pass, its input gradient and its weight gradient.
            for einsum in ["mk,kn->mn", "mk,nk->mn", "km,kn->mn"] {
                self.matmul(
                    DType::F32,
                    einsum,
                    (m, n, k),
                    "matmul f32".into(),
                    vec![m, n, k],
                );
            }
        }
        for dtype in [DType::Bf16, DType::F16] {
            for s in [256, 512] {
                // The forms of f32, with which these are compared.
                for einsum in ["mk,kn->mn", "mk,nk->mn", "km,kn->mn"] {
                    self.matmul(
                        dtype,
                        einsum,
                        (s, s, s),
                        format!("matmul {}", dtype.name()),
                        vec![s, s, s],
                    );
                }
            }
            for rows in if quick {
                vec![256]
            } else {
                vec![64, 512, 2048]
            } {
                self.conversions(dtype, rows, 256);
            }
        }
        let copies: &[u64] = if quick {
            &[1 << 18, 1 << 22]
        } else {
            &[1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
        };
        for &bytes in copies {
            let input = self.operand(DType::F32, &[bytes / 4]);
            let output = self.operand(DType::F32, &[bytes / 4]);
            self.probe("copy", vec![bytes], InstrKind::Copy { input, output });
        }
        let attention: &[(u64, u64, u64)] = if quick {
            &[(128, 4, 32), (128, 4, 64), (256, 4, 64)]
        } else {
            &[
                (64, 8, 32),
                (128, 4, 32),
                (128, 4, 64),
                (256, 8, 64),
                (512, 4, 64),
                (256, 4, 128),
            ]
        };
        for &(s, heads, d) in attention {
            self.attention(s, heads, d);
        }
        for rows in if quick {
            vec![256]
        } else {
            vec![64, 512, 2048]
        } {
            self.vectors(rows, 256);
        }
    }

    fn attention(&mut self, s: u64, heads: u64, d: u64) {
        let (q, lse) = ([1, s, heads, d], [1, s, heads]);
        let (q, lse) = ((DType::F32, &q[..]), (DType::F32, &lse[..]));
        let scale = 1.0 / (d as f64).sqrt();
        let point = |name: &str| {
            let what = format!("{name} f32");
            move |w: ir::op::Work| {
                let (products, vector) = (w.attention_flops as u64, w.vector_flops as u64);
                (what, vec![products, vector, w.bytes, s, s, d])
            }
        };
        self.op(
            OpKind::Attention {
                scale,
                dropout: 0.0,
                key: String::new(),
                order: ir::op::SequenceOrder::Natural,
                keys: Default::default(),
                bounds: Default::default(),
            },
            &[q, q, q],
            &[q, lse],
            point("attention"),
        );
        self.op(
            OpKind::AttentionGrad {
                scale,
                dropout: 0.0,
                key: "probe".into(),
                order: ir::op::SequenceOrder::Natural,
                keys: Default::default(),
                bounds: Default::default(),
            },
            &[q, q, q, q, lse, q],
            &[q, q, q],
            point("attention_grad"),
        );
    }

    fn vectors(&mut self, rows: u64, width: u64) {
        let (x, vector, column) = ([rows, width], [width], [rows]);
        let (x, vector, column) = (
            (DType::F32, &x[..]),
            (DType::F32, &vector[..]),
            (DType::F32, &column[..]),
        );
        let (heads, scalar) = ([1, rows, 4, width / 4], []);
        let (heads, scalar) = ((DType::F32, &heads[..]), (DType::F32, &scalar[..]));
        let (ids, tokens) = ([1, rows], [1, rows, width]);
        let (ids, tokens) = ((DType::I32, &ids[..]), (DType::F32, &tokens[..]));
        let (labels, third) = ((DType::I32, &[rows][..]), [rows, width / 4]);
        let third = (DType::F32, &third[..]);
        let mut add = |kind: OpKind, operands: &[(DType, &[u64])], results: &[(DType, &[u64])]| {
            let name = format!("vector {}", kind.kernel_name());
            self.op(kind, operands, results, |w| {
                (name, vec![(w.vector_flops as u64).max(1), w.bytes])
            });
        };
        add(OpKind::Binary { f: Binary::Add }, &[x, x], &[x]);
        add(OpKind::Unary { f: Unary::GeluTanh }, &[x], &[x]);
        add(
            OpKind::Binary {
                f: Binary::GeluTanhGrad,
            },
            &[x, x],
            &[x],
        );
        add(
            OpKind::LayerNorm { eps: 1e-5 },
            &[x, vector, vector],
            &[x, column, column],
        );
        add(
            OpKind::LayerNormGradInput,
            &[x, x, vector, column, column],
            &[x],
        );
        add(
            OpKind::LayerNormGradWeight,
            &[x, x, column, column],
            &[vector, vector],
        );
        add(
            OpKind::Rotary {
                theta: 1e4,
                scaling: RopeScaling::None,
                inverse: false,
                part: None,
                order: ir::op::SequenceOrder::Natural,
            },
            &[heads],
            &[heads],
        );
        add(OpKind::Unary { f: Unary::Silu }, &[x], &[x]);
        add(
            OpKind::Binary {
                f: Binary::SiluGrad,
            },
            &[x, x],
            &[x],
        );
        add(OpKind::Binary { f: Binary::Mul }, &[x, x], &[x]);
        add(OpKind::RmsNorm { eps: 1e-5 }, &[x, vector], &[x, column]);
        add(OpKind::RmsNormGradInput, &[x, x, vector, column], &[x]);
        add(OpKind::RmsNormGradWeight, &[x, x, column], &[vector]);
        add(
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims: vec![0],
            },
            &[x],
            &[vector],
        );
        add(
            OpKind::Stack { dim: 1 },
            &[third, third, third],
            &[(DType::F32, &[rows, 3, width / 4])],
        );
        add(
            OpKind::Unstack { dim: 1 },
            &[(DType::F32, &[rows, 3, width / 4])],
            &[third, third, third],
        );
        add(OpKind::Embedding, &[x, ids], &[tokens]);
        add(OpKind::EmbeddingGrad { vocab: rows }, &[ids, tokens], &[x]);
        add(OpKind::LogSumExp, &[x], &[column]);
        add(OpKind::CrossEntropyGrad, &[x, column, labels, column], &[x]);
        add(OpKind::Accumulate { dtype: DType::F32 }, &[x], &[x]);
        add(OpKind::SumSquares, &[x], &[scalar]);
        add(
            OpKind::Transpose { perm: vec![1, 0] },
            &[x],
            &[(DType::F32, &[width, rows])],
        );
        add(
            OpKind::AdamW {
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
            },
            &[x, x, x, x, scalar],
            &[x, x, x],
        );
    }

    /// Kernels with little work of their own on a type that is converted to f32 before and
    /// back after.
    fn conversions(&mut self, dtype: DType, rows: u64, width: u64) {
        let x = [rows, width];
        let (full, x) = ((DType::F32, &x[..]), (dtype, &x[..]));
        let mut add = |kind: OpKind, operands: &[(DType, &[u64])], results: &[(DType, &[u64])]| {
            let of_type = operands.iter().chain(results).filter(|t| t.0 == dtype);
            let converted = of_type.map(|t| t.1.iter().product::<u64>()).sum();
            let what = format!("convert {}", dtype.name());
            self.op(kind, operands, results, |w| {
                (what, vec![w.vector_flops as u64, w.bytes, converted])
            });
        };
        add(OpKind::Cast { dtype }, &[full], &[x]);
        add(OpKind::Cast { dtype: DType::F32 }, &[x], &[full]);
        add(OpKind::Binary { f: Binary::Add }, &[x, x], &[x]);
        add(
            OpKind::Unary {
                f: Unary::Scale { by: 0.5 },
            },
            &[x],
            &[x],
        );
        add(OpKind::Accumulate { dtype: DType::F32 }, &[x], &[full]);
    }

    pub(super) fn collectives(&mut self, quick: bool) {
        let sizes: &[u64] = if quick {
            &[1 << 12, 1 << 20]
        } else {
            &[1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22]
        };
        for &bytes in sizes {
            // All three of the same size: the whole tensor on one side at least.
            let lens = [(bytes / 4).next_multiple_of(u64::from(self.group))];
            let whole = ShardingSpec::replicated(1);
            let split = ShardingSpec {
                dims: Dims::from_iter([DimSharding::by([GROUP].as_slice(), 1)]),
                ..whole.clone()
            };
            let partial = ShardingSpec {
                partial: [(GROUP, ReduceKind::Sum)].into(),
                ..whole.clone()
            };
            let sum = Reduction::Sum;
            self.collective(
                CollectiveKind::AllReduce(sum),
                LayoutStep::AllReduce { axes: vec![GROUP] },
                &lens,
                partial.clone(),
                whole.clone(),
            );
            self.collective(
                CollectiveKind::ReduceScatter(sum),
                LayoutStep::ReduceScatter {
                    axis: GROUP,
                    dim: 0,
                    unit: 1,
                },
                &lens,
                partial,
                split.clone(),
            );
            self.collective(
                CollectiveKind::AllGather,
                LayoutStep::AllGather {
                    axis: GROUP,
                    dim: 0,
                },
                &lens,
                split,
                whole,
            );
        }
    }

    fn collective(
        &mut self,
        kind: CollectiveKind,
        step: LayoutStep,
        lens: &[u64],
        from: ShardingSpec,
        to: ShardingSpec,
    ) {
        let input = self.buffer(DType::F32, lens, from);
        self.push(InstrKind::Fill {
            value: 0.5,
            output: input,
        });
        let output = self.buffer(DType::F32, lens, to);
        self.barrier();
        let size = vec![
            lens[0] * 4,
            u64::from(self.group),
            u64::from(self.role.mesh.n_devices()),
        ];
        self.probe(
            kind.name(),
            size,
            InstrKind::Collective {
                contract: ir::Contract::new(kind, ir::DType::F32, ir::Order::Fixed),
                kind,
                axes: vec![GROUP],
                items: vec![CollectiveItem {
                    step,
                    input,
                    output,
                }],
            },
        );
    }

    /// A tiny all-reduce over everything, so that nobody waits in what is measured next.
    fn barrier(&mut self) {
        let axes = vec![AxisId(0), GROUP];
        let partial = axes.iter().map(|&a| (a, ReduceKind::Sum)).collect();
        let input = self.buffer(
            DType::F32,
            &[1],
            ShardingSpec {
                partial,
                ..ShardingSpec::replicated(1)
            },
        );
        let output = self.buffer(DType::F32, &[1], ShardingSpec::replicated(1));
        let items = vec![CollectiveItem {
            step: LayoutStep::AllReduce { axes: axes.clone() },
            input,
            output,
        }];
        self.push(InstrKind::Collective {
            contract: ir::Contract::new(
                CollectiveKind::AllReduce(Reduction::Sum),
                ir::DType::F32,
                ir::Order::Fixed,
            ),
            kind: CollectiveKind::AllReduce(Reduction::Sum),
            axes,
            items,
        });
    }

    /// The program, and what to measure in it. A loss, which sessions want to see, is added.
    pub(super) fn finish(mut self) -> (Program, Vec<Probe>) {
        self.next_offset = self.role.arena_bytes;
        self.role.loss = Some(self.buffer(DType::F32, &[], ShardingSpec::replicated(0)));
        let program = Program {
            roles: vec![self.role],
            transfers: vec![],
            n_microbatches: 1,
            microbatch: 1,
            route: ir::schedule::Route::Ring,
        };
        (program, self.probes)
    }
}
