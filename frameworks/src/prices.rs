//! Seconds of every instruction of an arranged program: what the cost model says of it, with what
//! software does to single kernels and collectives and to what stands beside them.

use crate::casts::Casts;
use crate::fused::Fused;
use crate::ops::{self, Around, Local};
use crate::streams::is_of;
use crate::{
    Software, accumulated, contention, experts, fused, gathers, host, paired, pieces, repeat,
};
use cost_model::classes::kinds_of_group;
use cost_model::collectives::Group;
use cost_model::compute::copy_time;
use cost_model::costs::InstrCost;
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::program::{CollectiveItem, InstrKind, RoleProgram, Template, TemplateKind};
use ir::{AxisId, BufferId, DType};
use std::collections::HashMap;

/// Makes of `costs`, by template and instruction, what a role takes under the software.
pub(crate) fn price(
    cluster: &Cluster,
    software: &Software,
    role: &RoleProgram,
    costs: &mut [Vec<InstrCost>],
) {
    let shapes = role.buffers.iter();
    let shapes = shapes.map(|b| (b.dtype, b.spec.local_shape(&b.lens, &role.mesh)));
    let mut prices = Prices {
        cluster,
        software,
        role,
        shapes: shapes.collect(),
        copies: experts::copies(role).filter(|_| software.dispatch_once_per_host),
        gathered: gathers::types(software, role),
        groups: HashMap::new(),
    };
    let mut host_s: Vec<Vec<f64>> = Vec::with_capacity(role.templates.len());
    for (t, (template, costs)) in role.templates.iter().zip(costs.iter_mut()).enumerate() {
        host_s.push(prices.template(template, costs));
        pieces::hide(cluster, software, role, template, costs);
        if software.overlapped_dispatch {
            let plays = role.trace.iter().filter(|s| s.template.index() == t);
            experts::overlap(role, template, plays.count(), costs);
        }
        if software.gathers_again {
            repeat::gather_again(role, template, costs);
        }
    }
    let share = contention::share(software, cluster.device.multiprocessors);
    paired::hide(role, software, share, costs);
    for (template, costs) in role.templates.iter().zip(costs.iter_mut()) {
        contention::slow_down(template, share, costs);
    }
    if software.recomputes_to_the_end {
        repeat::add(role, costs, &mut host_s);
    }
    for ((template, costs), host_s) in role.templates.iter().zip(costs).zip(&host_s) {
        host::wait(template, costs, host_s, software.synchronous_launches);
    }
}

struct Prices<'a> {
    cluster: &'a Cluster,
    software: &'a Software,
    role: &'a RoleProgram,
    shapes: Vec<Local>,
    /// Types in which buffers travel to the ranks whose matmuls read them.
    gathered: HashMap<BufferId, DType>,
    /// Experts of a token, where it crosses the network once for each host.
    copies: Option<u64>,
    /// By axes: one group of each kind.
    groups: HashMap<Vec<AxisId>, Vec<Group<'a>>>,
}

impl Prices<'_> {
    /// Prices the instructions of a template by themselves; returns the seconds in which the host
    /// issues each, a collective as one kernel.
    fn template(&mut self, template: &Template, costs: &mut [InstrCost]) -> Vec<f64> {
        let mut casts = Casts::new(self.role, template.kind, self.software);
        let fused = self.fused(template);
        let of_other_kernels = fused::made(template, &fused);
        let mut host_s = vec![0.0; costs.len()];
        let all = template.instructions.iter().zip(costs).zip(&mut host_s);
        for (((instruction, cost), host_s), fused) in all.zip(fused) {
            let mut cast = match self.software.kept_casts {
                true => casts.of(instruction),
                false => Vec::new(),
            };
            cast.retain(|b| !of_other_kernels.contains(b));
            match &instruction.kind {
                InstrKind::Compute {
                    path,
                    kind,
                    inputs,
                    outputs,
                } => {
                    let (operands, results) = (self.local(inputs), self.local(outputs));
                    let cast = self.local(&cast);
                    let around = Around {
                        unmoved_bytes: fused.unmoved_bytes,
                        more_bytes: fused.more_bytes,
                        narrow: self.software.narrow_of(path),
                        kept_casts: self.software.kept_casts.then_some(&cast[..]),
                    };
                    let (c, s) = (self.cluster, self.software);
                    let seconds = ops::device_time(c, s, kind, &operands, &results, around);
                    if !fused.into_next && !fused.into_previous {
                        *host_s = ops::host_time(self.software, kind);
                    }
                    cost.seconds = match (fused.into_previous, fused.into_next) {
                        (true, _) => 0.0,
                        (_, true) => (seconds - self.cluster.device.launch_s).max(0.0),
                        _ => seconds,
                    };
                }
                InstrKind::Collective {
                    kind, axes, items, ..
                } => {
                    cost.seconds = self.collective(template.kind, *kind, axes, items);
                    *host_s = self.software.host_s_per_kernel;
                }
                _ => {}
            }
        }
        host_s
    }

    /// The part of each instruction of a template that another one's kernel does.
    fn fused(&self, template: &Template) -> Vec<Fused> {
        let bytes_in = |b: BufferId, sum: Option<DType>| {
            let (dtype, lens) = &self.shapes[b.index()];
            let element = sum.unwrap_or(*dtype).bytes();
            lens.iter().fold(element, |a, &n| a.saturating_mul(n))
        };
        let bytes = |b: BufferId| bytes_in(b, None);
        let mut fused = match self.software.fused_elementwise {
            true => fused::fused(template, bytes),
            false => vec![Fused::default(); template.instructions.len()],
        };
        if self.software.fused_gradient_sums {
            let sum_bytes = |b: BufferId| bytes_in(b, self.software.sum_dtype);
            accumulated::into_matmuls(template, &mut fused, bytes, sum_bytes);
        }
        if self.software.fused_experts {
            experts::fuse(template, &mut fused);
        }
        fused
    }

    fn local(&self, ids: &[BufferId]) -> Vec<Local> {
        ids.iter().map(|b| self.shapes[b.index()].clone()).collect()
    }

    fn bytes(&self, buffer: BufferId) -> u64 {
        self.role.buffer(buffer).bytes
    }

    fn collective(
        &mut self,
        template: TemplateKind,
        kind: CollectiveKind,
        axes: &[AxisId],
        items: &[CollectiveItem],
    ) -> f64 {
        let copied = self.copied(kind, axes, items);
        let bytes = items
            .iter()
            .map(|i| self.wire_bytes(kind, i))
            .fold(0u64, u64::saturating_add);
        let at_once = self.software.copies_meet_at_once && self.scatters_gradients();
        if at_once && template == TemplateKind::StepEnd && self.is_over_copies(kind, axes) {
            return 0.0;
        }
        // Updated parameters reach the others by a broadcast from each member.
        let once = matches!(template, TemplateKind::StepBegin | TemplateKind::StepEnd);
        let broadcasts =
            self.software.broadcast_updates && once && kind == CollectiveKind::AllGather;
        let copies = self.copies.filter(|_| kind == CollectiveKind::AllToAll);
        let meeting = match at_once && template.is_backward() {
            true => self.meeting_of_copies(kind, axes, items),
            false => 0.0,
        };
        let groups = self.groups_of(axes);
        let seconds = |group: &Group<'_>| match copies {
            _ if broadcasts => {
                let n = group.n_members();
                n as f64 * group.broadcast_time(bytes / n.max(1)).0
            }
            Some(copies) => group.dispatch_time(bytes, copies).0,
            None => group.time(kind, bytes).0,
        };
        copied + meeting + groups.iter().map(seconds).fold(0.0, f64::max)
    }

    fn groups_of(&mut self, axes: &[AxisId]) -> &[Group<'_>] {
        let (cluster, mesh) = (self.cluster, &self.role.mesh);
        self.groups.entry(axes.to_vec()).or_insert_with(|| {
            let kinds = kinds_of_group(cluster, mesh, axes).into_iter();
            kinds
                .map(|rank| Group::of_rank(cluster, mesh, axes, rank))
                .collect()
        })
    }

    /// Whether gradients are scattered over ranks that split samples in the microbatches: behind that
    /// copies meet.
    fn scatters_gradients(&self) -> bool {
        let passes = self.role.templates.iter().filter(|t| t.kind.is_backward());
        let mut all = passes.flat_map(|t| &t.instructions);
        all.any(|i| match &i.kind {
            InstrKind::Collective { kind, axes, .. } => self.is_of_gradients(*kind, axes),
            _ => false,
        })
    }

    fn is_of_gradients(&self, kind: CollectiveKind, axes: &[AxisId]) -> bool {
        let is_data = |a: &AxisId| self.role.mesh.name(*a) == "data";
        matches!(kind, CollectiveKind::ReduceScatter(_)) && axes.iter().any(is_data)
    }

    /// Whether gradients meet those of copies of the same states, and nothing else.
    fn is_over_copies(&self, kind: CollectiveKind, axes: &[AxisId]) -> bool {
        let is_copy = |a: &AxisId| self.role.mesh.name(*a) == "replica";
        matches!(kind, CollectiveKind::AllReduce(_)) && axes.iter().all(is_copy)
    }

    /// Seconds in which the results of a reduction of gradients meet those of the copies, right behind
    /// it; 0 where there are none.
    fn meeting_of_copies(
        &mut self,
        kind: CollectiveKind,
        axes: &[AxisId],
        items: &[CollectiveItem],
    ) -> f64 {
        let mesh = &self.role.mesh;
        let CollectiveKind::ReduceScatter(reduction) = kind else {
            return 0.0;
        };
        let is_copy = |a: &AxisId| mesh.name(*a) == "replica" && mesh.size(*a) > 1;
        let copies = mesh.axis_ids().find(is_copy);
        let Some(copies) = copies.filter(|_| self.is_of_gradients(kind, axes)) else {
            return 0.0;
        };
        let kind = CollectiveKind::AllReduce(reduction);
        let element = |i: &CollectiveItem| {
            let dtype = self.role.buffer(i.output).dtype;
            let sent = self.software.gradient_dtype.unwrap_or(dtype);
            self.bytes(i.output) / dtype.bytes() * sent.bytes()
        };
        let bytes = items.iter().map(element).fold(0u64, u64::saturating_add);
        let groups = self.groups_of(&[copies]).iter();
        groups.map(|g| g.time(kind, bytes).0).fold(0.0, f64::max)
    }

    /// Bytes of a collective's item; sums in f32 travel in the software's type for gradients,
    /// operands of matmuls perhaps in the matmuls' type.
    ///
    /// Gradients that are reduced in every microbatch (ZeRO 2 and 3) travel as the program has them,
    /// also where software casts them to f32 before: programs of other software keep no memory for
    /// such reductions to go on beside kernels, so that their time would be counted twice over.
    fn wire_bytes(&self, kind: CollectiveKind, item: &CollectiveItem) -> u64 {
        let bytes = self.bytes(item.input).max(self.bytes(item.output));
        let dtype = self.role.buffer(item.input).dtype;
        let half = matches!(dtype, DType::Bf16 | DType::F16);
        let usual = self.software.narrow.map(|n| n.dtype);
        let narrow = self.gathered.get(&item.output).copied().or(usual);
        let narrow = narrow.filter(|_| self.software.narrow_gathers);
        match (kind, narrow, self.software.gradient_dtype) {
            (CollectiveKind::AllGather, Some(narrow), _) if half => {
                bytes / dtype.bytes() * narrow.bits() / 8
            }
            (CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_), _, Some(sum))
                if dtype == DType::F32 =>
            {
                bytes / dtype.bytes() * sum.bytes()
            }
            _ => bytes,
        }
    }

    /// Seconds of copying what is gathered or scattered into its place, by the device and, where
    /// the host does so rank by rank, by the host before it.
    fn copied(&self, kind: CollectiveKind, axes: &[AxisId], items: &[CollectiveItem]) -> f64 {
        let is_copied = |a: &AxisId| is_of(self.role, &self.software.copied_axes, *a);
        if matches!(kind, CollectiveKind::AllReduce(_)) || !axes.iter().any(is_copied) {
            return 0.0;
        }
        let whole = |i: &CollectiveItem| self.bytes(i.input).max(self.bytes(i.output));
        let ranks: u64 = match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter(_) => {
                axes.iter().map(|a| self.role.mesh.size(*a)).product()
            }
            _ => 0,
        };
        let copies = items.iter().map(|i| copy_time(self.cluster, whole(i)).0);
        copies.sum::<f64>() + ranks as f64 * self.software.host_s_per_part
    }
}
