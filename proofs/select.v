(** Selection by the threshold that [radix.v] finds returns exactly the top M, ties going to the lower page.

    The pages are the positions 0 .. N-1 of the list [s] of their keys. *)
From mathcomp Require Import all_ssreflect.
From Locks Require Import radix.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

Implicit Types (s : seq nat) (b n M c tau i j : nat).

(** * The specification *)

Definition key s i := nth 0 s i.

(** Page i comes before page j: the larger key, or the lower page where keys are equal. *)
Definition before s i j := (key s j < key s i) || ((key s i == key s j) && (i <= j)).

(** The first M pages of the list sorted by (key descending, page ascending). *)
Definition top M s := take M (sort (before s) (iota 0 (size s))).

(** * The algorithm *)

(** Page i is kept when its key is above the threshold, or equal to it and among the first [c] that are. *)
Definition keeps tau c s i :=
  (tau < key s i) || ((key s i == tau) && (count_mem tau (take i s) < c)).

(** The page list that the kernel writes, pages ascending. *)
Definition select b n M s : seq nat :=
  if size s <= M then iota 0 (size s)
  else [seq i <- iota 0 (size s) | keeps (radix b n M s) (need b n M s) s i].

(** * The kept pages *)

Section Kept.
Variables (s : seq nat) (tau M : nat).

(** Ties are counted along the list: as many as are wanting are kept, if there are so many. *)
Lemma count_first_ties c :
  count (fun i => (key s i == tau) && (count_mem tau (take i s) < c)) (iota 0 (size s)) =
  minn c (count_mem tau s).
Proof.
elim/last_ind: s => [|r x IH]; first by rewrite minn0.
rewrite size_rcons -addn1 iotaD count_cat /= add0n addn0.
rewrite (eq_in_count (a2 := fun i => (key r i == tau) && (count_mem tau (take i r) < c))); last first.
  move=> i; rewrite mem_iota /= add0n => ir.
  by rewrite /key nth_rcons ir -cats1 takel_cat // ltnW.
rewrite IH /key nth_rcons ltnn eqxx -cats1 take_size_cat // count_cat /= addn0.
case: (x == tau); rewrite ?addn0 //= addn1.
case: (ltnP (count_mem tau r) c) => [lt|ge] /=; rewrite ?addn1 ?addn0.
  by rewrite !(minn_idPr _) // ltnW.
by rewrite !(minn_idPl _) // ltnW.
Qed.

Hypotheses (enough : M <= count_ge tau s) (few : count_gt tau s <= M).

Let kept := [seq i <- iota 0 (size s) | keeps tau (M - count_gt tau s) s i].

Lemma size_kept : size kept = M.
Proof.
pose above i := tau < key s i.
pose tied i := (key s i == tau) && (count_mem tau (take i s) < M - count_gt tau s).
have apart : count (predI above tied) (iota 0 (size s)) = 0.
  rewrite (eq_count (a2 := pred0)) ?count_pred0 // => i.
  by rewrite /= /above /tied; case: (ltngtP tau (key s i)).
have above_count : count above (iota 0 (size s)) = count_gt tau s.
  by rewrite -[in RHS](mkseq_nth 0 s) /count_gt count_map.
rewrite size_filter -[LHS]addn0 -[X in _ + X = _]apart (count_predUI above tied) above_count count_first_ties.
by rewrite (minn_idPl _) ?subnKC // leq_subLR -count_ge_split.
Qed.

(** Each kept page comes before each page that is not kept. *)
Lemma kept_before i j :
  i \in kept -> j < size s -> j \notin kept -> before s i j.
Proof.
rewrite !mem_filter !mem_iota !add0n /= => /andP[ki _] js; rewrite js andbT /keeps => nkj.
move: ki nkj; rewrite /before /keeps; case: (ltngtP tau (key s j)) => //= [lt_j|eq_j].
  case: (ltngtP tau (key s i)) => //= [lt_i _ _ | <- _ _]; last by rewrite lt_j.
  by rewrite (ltn_trans lt_j lt_i).
rewrite -eq_j -leqNgt; case: (ltngtP tau (key s i)) => //= _ first_i late_j.
rewrite leqNgt; apply/negP => ji.
have : count_mem tau (take j s) <= count_mem tau (take i s).
  by rewrite -(subnKC (ltnW ji)) takeD count_cat leq_addr.
by rewrite leqNgt (leq_trans first_i).
Qed.

End Kept.

(** * Equality with the specification *)

Lemma before_total s : total (before s).
Proof. by move=> i j; rewrite /before; case: (ltngtP (key s i) (key s j)) => //= _; apply: leq_total. Qed.

Lemma before_trans s : transitive (before s).
Proof.
move=> j i k; rewrite /before.
case: (ltngtP (key s j) (key s i)) => [ji _|//|<-] /=.
  case: (ltngtP (key s k) (key s j)) => //= [kj _ | -> _]; last by rewrite ji.
  by rewrite (ltn_trans kj ji).
by case: (ltngtP (key s k) (key s j)) => //= _; apply: leq_trans.
Qed.

Lemma before_anti s : antisymmetric (before s).
Proof.
move=> i j; rewrite /before; case: (ltngtP (key s i) (key s j)) => //= _.
by rewrite -eqn_leq => /eqP.
Qed.

Lemma top_uniq M s : uniq (top M s).
Proof. by rewrite take_uniq // sort_uniq iota_uniq. Qed.

Lemma size_top M s : size (top M s) = minn M (size s).
Proof. by rewrite size_take size_sort size_iota /minn; case: ltngtP. Qed.

(** Each page of the specification comes before each page outside it. *)
Lemma top_before M s i j : i \in top M s -> j < size s -> j \notin top M s -> before s i j.
Proof.
move=> it js jt; have j_sorted : j \in sort (before s) (iota 0 (size s)).
  by rewrite mem_sort mem_iota.
have : pairwise (before s) (sort (before s) (iota 0 (size s))).
  rewrite -sorted_pairwise; last exact: before_trans.
  by apply: sort_sorted; apply: before_total.
rewrite -[sort _ _](cat_take_drop M) pairwise_cat => /and3P[/allrelP cross _ _].
apply: cross => //; move: j_sorted.
by rewrite -{1}[sort _ _](cat_take_drop M) mem_cat -/(top M s) (negbTE jt).
Qed.

(** A set of pages of the right size, each of which comes before each page outside, is the top. *)
Lemma top_unique M s (l : seq nat) :
  uniq l -> {subset l <= iota 0 (size s)} -> size l = minn M (size s) ->
  (forall i j, i \in l -> j < size s -> j \notin l -> before s i j) ->
  l =i top M s.
Proof.
move=> l_uniq l_sub l_size l_before.
suff sub : {subset l <= top M s}.
  by have [] := uniq_min_size l_uniq sub; rewrite l_size size_top.
move=> i il; apply/negPn/negP => it.
have i_lt : i < size s by have := l_sub i il; rewrite mem_iota.
have [j jt jl] : exists2 j, j \in top M s & j \notin l.
  apply/allPn; apply: contra it => /allP top_sub.
  by have [|_ ->] := uniq_min_size (top_uniq M s) top_sub; rewrite ?l_size ?size_top.
have j_lt : j < size s by have := mem_take jt; rewrite mem_sort mem_iota.
have := l_before i j il j_lt jl; have := top_before jt i_lt it.
by move=> ji ij; have eq_ij := @before_anti s i j; rewrite eq_ij ?ij // jt in it.
Qed.

(** Any threshold with M keys or more at or above it, and M or fewer above, selects the top M, pages ascending. *)
Theorem threshold_top tau M s :
  M <= count_ge tau s -> count_gt tau s <= M ->
  let kept := [seq i <- iota 0 (size s) | keeps tau (M - count_gt tau s) s i] in
  sorted ltn kept /\ perm_eq kept (top M s).
Proof.
move=> enough few kept.
have kept_sorted : sorted ltn kept by apply: (sorted_filter ltn_trans); apply: iota_ltn_sorted.
have kept_uniq : uniq kept by apply: sorted_uniq kept_sorted; [apply: ltn_trans | apply: ltnn].
split=> //; apply: uniq_perm => //; first exact: top_uniq.
apply: top_unique => // [i||i j].
- by rewrite mem_filter => /andP[].
- by rewrite size_kept // (minn_idPl _) // (leq_trans enough) // count_size.
- exact: kept_before.
Qed.

(** For keys of n digits to the base b: the pages are listed in ascending order, there are min(M, N) of
    them, they are the top M of the specification, and each kept page comes before each that is not. *)
Theorem select_top b n M s :
  0 < b -> all (fun x => x < b ^ n) s ->
  let kept := select b n M s in
  [/\ sorted ltn kept,
      size kept = minn M (size s),
      perm_eq kept (top M s)
    & forall i j, i \in kept -> j < size s -> j \notin kept ->
        (key s j < key s i) || ((key s i == key s j) && (i < j))].
Proof.
move=> b0 below kept.
have kept_sorted : sorted ltn kept.
  rewrite /kept /select; case: ifP => _; first exact: iota_ltn_sorted.
  by apply: (sorted_filter ltn_trans); apply: iota_ltn_sorted.
have kept_uniq : uniq kept by apply: sorted_uniq kept_sorted; [apply: ltn_trans | apply: ltnn].
have kept_sub : {subset kept <= iota 0 (size s)}.
  by move=> i; rewrite /kept /select; case: ifP => // _; rewrite mem_filter => /andP[].
have [kept_size kept_bef] : size kept = minn M (size s) /\
    forall i j, i \in kept -> j < size s -> j \notin kept -> before s i j.
  rewrite /kept /select needE //; case: (leqP (size s) M) => [all_kept | some_left].
    by rewrite size_iota; split=> // i j _ js; rewrite mem_iota /= js.
  have [enough few] := radix_threshold b0 below (ltnW some_left).
  have few' := leq_trans few (leq_pred M).
  by rewrite size_kept //; split=> // i j; apply: kept_before.
split=> // [|i j ik js jk].
  by apply: uniq_perm => //; [apply: top_uniq | apply: top_unique].
have ij : i != j by apply: contraNneq jk => <-.
by have := kept_bef i j ik js jk; rewrite /before [i <= j]leq_eqVlt (negbTE ij).
Qed.

(** A case to look at: five keys of two binary digits with a tie at the threshold. *)
Example select_example : select 2 2 3 [:: 1; 3; 2; 2; 2] = [:: 1; 2; 3].
Proof. by []. Qed.

(** * Groups *)

(** The keys of group k, of g pages (the last group may have fewer), and the largest key of each group. *)
Definition group g s k := take g (drop (k * g) s).
Definition maxima g s := [seq \max_(x <- group g s k) x | k <- iota 0 ((size s + g.-1) %/ g)].

Lemma max_in (r : seq nat) : 0 < size r -> \max_(x <- r) x \in r.
Proof.
elim: r => [//|x [|y r] IH _]; first by rewrite big_seq1 inE.
rewrite big_cons in_cons; case: (leqP x (\max_(z <- y :: r) z)) => _; last by rewrite eqxx.
by rewrite IH ?orbT.
Qed.

Section Groups.
Variables (g : nat) (s : seq nat).
Hypothesis positive : 0 < g.

Lemma size_maxima : size (maxima g s) = (size s + g.-1) %/ g.
Proof. by rewrite size_map size_iota. Qed.

Lemma group_starts k : (k < size (maxima g s)) = (k * g < size s).
Proof.
rewrite size_maxima leq_divRL // mulSn.
have -> : g + k * g = (k * g).+1 + g.-1 by rewrite addSnnS prednK // addnC.
by rewrite leq_add2r.
Qed.

Lemma key_maxima k : k < size (maxima g s) -> key (maxima g s) k = \max_(x <- group g s k) x.
Proof. by move=> lt; rewrite /key (nth_map 0) ?size_iota -?size_maxima // nth_iota ?add0n -?size_maxima. Qed.

Lemma size_group k : k * g < size s -> 0 < size (group g s k).
Proof. by move=> lt; rewrite size_take size_drop; case: ifP => _ //; rewrite subn_gt0. Qed.

Lemma key_group k j : j < g -> nth 0 (group g s k) j = key s (k * g + j).
Proof. by move=> lt; rewrite /group nth_take // nth_drop. Qed.

(** No page's key is above its group's largest. *)
Lemma key_le_max i : i < size s -> key s i <= key (maxima g s) (i %/ g).
Proof.
move=> lt; have start : i %/ g * g < size s by rewrite (leq_ltn_trans (leq_trunc_div i g)).
have mod_lt := ltn_pmod i positive.
rewrite key_maxima ?group_starts // [in key s i](divn_eq i g) -key_group //.
apply: (leq_bigmax_seq (F := id)) => //; apply: mem_nth.
rewrite size_take size_drop; case: ifP => // _.
by rewrite ltn_subRL -divn_eq.
Qed.

(** The first page of a group that has the group's largest key. *)
Definition first_max k := k * g + index (key (maxima g s) k) (group g s k).

Lemma first_maxP k : k < size (maxima g s) ->
  [/\ first_max k < size s, first_max k %/ g = k & key s (first_max k) = key (maxima g s) k].
Proof.
move=> lt; have start : k * g < size s by rewrite -group_starts.
have inside : key (maxima g s) k \in group g s k by rewrite key_maxima // max_in ?size_group.
have idx := inside; rewrite -index_mem in idx.
have idx_g : index (key (maxima g s) k) (group g s k) < g.
  by apply: (leq_trans idx); rewrite size_take; case: ifP => [//|/negbT]; rewrite -leqNgt.
split.
- rewrite /first_max -ltn_subRL; apply: (leq_trans idx).
  by rewrite size_take size_drop; case: ifP => // /ltnW.
- by rewrite /first_max divnMDl // divn_small // addn0.
- by rewrite /first_max -key_group // nth_index.
Qed.

(** The M first groups, by (largest key descending, group ascending), hold the M first pages. *)
Theorem groups_hold_top M i : i \in top M s -> i %/ g \in top M (maxima g s).
Proof.
move=> it; have i_lt : i < size s by have := mem_take it; rewrite mem_sort mem_iota.
have k_lt : i %/ g < size (maxima g s).
  by rewrite group_starts (leq_ltn_trans (leq_trunc_div i g)).
apply/negPn/negP => kt.
pose l := map first_max (top M (maxima g s)).
have in_range k : k \in top M (maxima g s) -> k < size (maxima g s).
  by move=> /mem_take; rewrite mem_sort mem_iota.
have l_uniq : uniq l.
  rewrite map_inj_in_uniq ?top_uniq // => a b /in_range/first_maxP[_ a_div _] /in_range/first_maxP[_ b_div _] eq_ab.
  by rewrite -a_div -b_div eq_ab.
have l_before j : j \in l -> before s j i.
  move=> /mapP[k kM ->]; have [_ k_div k_key] := first_maxP (in_range _ kM).
  have := top_before kM k_lt kt; have le_i := key_le_max i_lt.
  have ne : k != i %/ g by apply: contraNneq kt => <-.
  rewrite /before k_key => /orP[lt|/andP[/eqP eq_k le_k]].
    by rewrite (leq_ltn_trans le_i lt).
  rewrite -eq_k in le_i; move: le_i; rewrite leq_eqVlt => /orP[/eqP ->|->//].
  rewrite eqxx ltnn /=; apply: ltnW; have lt_k : k < i %/ g by rewrite ltn_neqAle ne.
  by rewrite ltnNge; apply: contraL lt_k => le; rewrite -leqNgt -k_div leq_div2r.
have l_top : {subset l <= top M s}.
  move=> j jl; apply/negPn/negP => jt.
  have j_lt : j < size s by have /mapP[k /in_range/first_maxP[lt _ _] ->] := jl.
  have eq_ij : i = j by apply: (@before_anti s); rewrite (top_before it j_lt jt) (l_before j jl).
  by rewrite -eq_ij it in jt.
have il : i \notin l.
  by apply: contra kt => /mapP[k kM ->]; have [_ -> _] := first_maxP (in_range _ kM).
have l_size : size l = M.
  rewrite size_map size_top; apply/minn_idPl; rewrite leqNgt; apply: contra kt => le.
  by rewrite /top take_oversize ?mem_sort ?mem_iota // size_sort size_iota ltnW.
have : size (i :: l) <= size (top M s).
  by apply: uniq_leq_size => [|j]; rewrite ?cons_uniq ?il // inE => /orP[/eqP ->|/l_top].
by rewrite /= l_size size_top leqNgt ltnS geq_minl.
Qed.

End Groups.
